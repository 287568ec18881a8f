#!/bin/sh
# What the tests need from the system: a browser that opens the report. Installed where we may, named where we may not.
command -v chromium >/dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    echo "installing chromium, which the tests open the report with"
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
fi
echo "the tests open the report in a real browser: install chromium (apt-get install chromium) and run make test again"
exit 4
