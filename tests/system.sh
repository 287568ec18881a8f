#!/bin/sh
# What the tests need from the system, as command:package. Installed where we may, named where we may not.
needed="chromium:chromium promtool:prometheus prometheus:prometheus ip:iproute2 tc:iproute2 mpirun:openmpi-bin
mpicc:libopenmpi-dev slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge sshd:openssh-server
ssh:openssh-client"
PATH="$PATH:/usr/sbin"
missing=""
for entry in $needed; do
    command -v "${entry%%:*}" >/dev/null 2>&1 || missing="$missing ${entry#*:}"
done
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    echo "installing what the tests use (a browser, network tools, MPI, Slurm, sshd):$missing"
    # shellcheck disable=SC2086
    apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null && exit 0
fi
echo "the tests use a real browser, real hosts, MPI, Slurm and sshd: apt-get install$missing, and run make test again"
exit 4
