"""Writes weft/extensions/pretrained/config_defaults.json: the defaults of the keys of published configs, from the
installed transformers."""

from weft.extensions.pretrained.config_defaults import MODULES, TABLE, table_text
from weft.extensions.pretrained.families import PRETRAINED

KINDS = {*MODULES, *(family.kind for family in PRETRAINED)}

if __name__ == "__main__":
    TABLE.write_text(table_text(KINDS), encoding="utf-8")
