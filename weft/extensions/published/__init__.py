"""Other people's measured runs: tables of them, and how near the planner's estimates come.

Registers what `weft estimate --table` does.
"""

from weft.cli.table_scorers import TABLE_SCORERS, TableScorer

PACKAGE = __name__

TABLE_SCORERS.register(TableScorer("published", f"{PACKAGE}.score:score_table", f"{PACKAGE}.score:show_table"))
