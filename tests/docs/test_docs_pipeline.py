"""docs/pipeline.md: its tables and its error message are those of the code."""

from helpers.docs_pages import maker, text_of

from weft.planner.schedules.known_schedules import check_schedule


def test_the_tables_are_up_to_date() -> None:
    text = text_of("pipeline")
    assert maker("pipeline").page(text) == text, "pipeline.md is old: run python docs/make_pipeline.py"


def test_the_error_message_is_the_real_one() -> None:
    assert (check_schedule("zbv", 4, 8, 3) or "") + "\n" in text_of("pipeline")
