"""TensorBoard event files in RUN/tensorboard, written without torch."""

from __future__ import annotations

import json
import time
from pathlib import Path

import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from weft.watch.tracker_adapter import TrackedRun, TrackedStep

DT_STRING = 7
FOLDER = "tensorboard"


class TensorBoard:
    """Scalars by step; job, plan, events and the report's place as texts."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.state.setdefault("folder", str(run.folder / FOLDER))
        self.writer = EventFileWriter(folder)
        if not run.state.get("described"):
            self._text("job", f"```\n{yaml.safe_dump(run.job, sort_keys=False)}```", 0)
            self._text("plan", f"```\n{json.dumps(run.plan, indent=2)}\n```", 0)
            run.state["described"] = True

    def log(self, steps: list[TrackedStep]) -> None:
        for entry in steps:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in entry.values.items()]
            self.writer.add_event(Event(wall_time=entry.wall_time, step=entry.step, summary=Summary(value=values)))
        self.writer.flush()

    def event(self, kind: str, text: str, step: int | None, bad: bool) -> None:
        self._text(f"events/{kind}", f"**{text}**" if bad else text, step or 0)
        self.writer.flush()

    def finish(self, status: str, report: Path | None) -> None:
        self._text("end", f"{status}; report: {report}" if report else status, 0)
        self.writer.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode("utf-8", "replace")], tensor_shape=shape)
        metadata = create_summary_metadata(display_name="", description="")
        value = Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))
