"""GuideLLM's benchmark: twelve streamed requests of chat, two at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import MODEL, URL, call


@call("benchmark run, streamed chat")
def _benchmark() -> None:
    report = Path(tempfile.mkdtemp()) / "report.json"
    subprocess.run(
        [
            str(Path(sys.executable).with_name("guidellm")), "benchmark", "run",
            f"--target={URL.removesuffix('/v1')}", f"--model={MODEL}",
            f"--processor={os.environ['MODEL_DIR']}", "--profile=concurrent", "--rate=2",
            "--max-requests=12", "--data=prompt_tokens=40,output_tokens=8",
            f"--output-path={report}", "--outputs=json",
        ],
        check=True, stdout=sys.stderr,
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    done = benchmark["metrics"]["request_totals"]
    assert (done["successful"], done["errored"]) == (12, 0), done
