"""Computes ModelReady: whether the model of the wanted revision is in its claim. Pure.

Job complete                        True   Downloaded
Job failed                          False  DownloadFailed, a user must act
claim without a volume              False  ClaimPending, or ClaimLost
else                                False  Downloading, with the progress or what prevents it
"""

from __future__ import annotations

import math
import re

from vlm_operator.cluster import epoch_seconds
from vlm_operator.state.cluster_view import DownloadPod, DownloadProgress, one_line
from vlm_operator.state.downloads import DownloadState
from vlm_operator.status.causes import Problem
from vlm_operator.status.inputs import ConditionReason, ConditionState, StatusInputs

NO_CLASS_SECONDS = 60.0
"""Time after which a claim without a StorageClass needs a user."""
_PERCENT_STEP = 5
_GIB, _MIB = 2**30, 2**20


def model_ready(view: StatusInputs) -> ConditionState | None:
    """Return ModelReady; None without `model.cache`."""
    download = view.download
    if download is None:
        return None
    if download.complete:
        message = f"{_model(view)} is in PersistentVolumeClaim {download.name}"
        return ConditionState("ModelReady", True, "Downloaded", message)
    if view.service.spec.stopped:
        return ConditionState("ModelReady", False, "Stopped", "spec.stopped is set")
    problem = download_problem(view)
    if problem is not None:
        return ConditionState("ModelReady", False, problem.reason, problem.message)
    return ConditionState("ModelReady", False, "Downloading", _progress(view, download))


def download_problem(view: StatusInputs) -> Problem | None:
    """Return what prevents the download; None if nothing does."""
    download = view.download
    if download is None or download.complete or view.service.spec.stopped:
        return None
    if download.failed is not None and not download.orphaned:
        return _failed(view, download, download.failed)
    claim = f"PersistentVolumeClaim {download.name}"
    pod = next(iter(download.running), None)
    if download.claim_phase == "Lost":
        fix = f"delete it, the operator makes another: kubectl {_space(view)} delete pvc"
        return Problem("ClaimLost", claim, "its volume is gone", f"{fix} {download.name}", 0.0, 0.0)
    if download.claim is not None and "deletionTimestamp" in download.claim["metadata"]:
        cause = "it is being deleted and a pod mounts it"
        return Problem("ClaimPending", claim, cause, "", 0.0, None)
    if download.claim_phase == "Pending" and not (pod and pod.scheduled):
        return _pending(view, download, pod)
    if pod is not None and pod.blocked and not pod.started:
        fix = "correct model.cache.podTemplate, or what the cause names"
        return Problem("Downloading", f"pod {pod.name}", pod.blocked, fix, pod.created, None)
    return None


def _failed(view: StatusInputs, download: DownloadState, message: str) -> Problem:
    last = next((pod for pod in reversed(download.pods) if pod.failed), None)
    cause, fix = _parts("" if last is None else last.error)
    if not cause:
        cause = one_line((last.blocked if last is not None else "") or message or "it failed")
    again = f"then delete the Job: kubectl {_space(view)} delete job {download.name}"
    fix = f"{one_line(fix) or 'correct the cause'}, {again}"
    since = 0.0 if last is None else last.created
    cause = one_line(cause)
    return Problem(ConditionReason.DOWNLOAD_FAILED, f"Job {download.name}", cause, fix, since, 0.0)


def _parts(error: str) -> tuple[str, str]:
    """Return cause and fix of a download's last line, without the flag, which is the operator's."""
    cause, _, fix = error.partition("; ")
    return re.sub(r"^--[a-z-]+: ", "", cause), fix


def _pending(view: StatusInputs, download: DownloadState, pod: DownloadPod | None) -> Problem:
    assert download.claim is not None
    meta, spec = download.claim["metadata"], download.claim["spec"]
    since = epoch_seconds(meta["creationTimestamp"]) if "creationTimestamp" in meta else 0.0
    subject = f"PersistentVolumeClaim {download.name}"
    storage_class = spec.get("storageClassName")
    if not storage_class:
        cause = "the cluster has no default StorageClass"
        fix = "set model.cache.claim.storageClassName, or mark a class as the default"
        return Problem("ClaimPending", subject, cause, fix, since, NO_CLASS_SECONDS)
    modes = ", ".join(spec.get("accessModes", ()))
    cause = f"StorageClass {storage_class} has given it no volume yet ({modes})"
    if pod is not None and pod.unscheduled and "unbound" not in pod.unscheduled:
        cause += f": {pod.unscheduled}"
    fix = f"see kubectl {_space(view)} describe pvc {download.name}"
    return Problem("ClaimPending", subject, cause, fix, since, None)


def _progress(view: StatusInputs, download: DownloadState) -> str:
    name, running = _model(view), download.running
    failures = [pod for pod in download.pods if pod.failed]
    last = failures[-1] if failures else None
    before = ""
    if last is not None:
        cause = _parts(last.error)[0] or last.blocked or "no cause is known"
        before = f"; attempt {len(failures)} failed: {one_line(cause)}"
    if not running:
        what = "the next attempt begins soon" if failures else f"Job {download.name} creates a pod"
        return f"{name}: {what}{before}"
    pod = running[-1]
    if pod.progress is not None:
        return f"{name}: {_share(pod.progress)}{before}"
    if not pod.started:
        where = "starts" if pod.scheduled else "waits for a node"
        return f"{name}: pod {pod.name} {where}{before}"
    return f"{name}: pod {pod.name} downloads it{before}"


def _share(progress: DownloadProgress) -> str:
    """Describe a progress in steps, because each new text is a write of the status."""
    total = progress.total_bytes
    if total <= 0:
        return "its files are listed"
    percent = 100 * progress.num_bytes // total // _PERCENT_STEP * _PERCENT_STEP
    size = f"{total / _GIB:.1f} GiB" if total >= _GIB else f"{total / _MIB:.1f} MiB"
    if progress.checking:
        return f"{percent} % of {size} are checked"
    left = progress.seconds_left
    return f"{percent} % of {size}" + ("" if left is None else f", {_duration(left)} left")


def _duration(seconds: float) -> str:
    """Round a time up: to 10 s below two minutes, else to minutes."""
    if seconds < 120:
        return f"{max(1, math.ceil(seconds / 10)) * 10} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{math.ceil(minutes / 60)} h"


def _model(view: StatusInputs) -> str:
    model = view.service.spec.model
    return f"{model.uri} at {(model.revision or '')[:12]}"


def _space(view: StatusInputs) -> str:
    return f"-n {view.service.namespace}"
