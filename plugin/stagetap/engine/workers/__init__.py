"""vLLM's workers with capture installed right after the model is loaded, one file a platform."""

from __future__ import annotations

from typing import Any

from stagetap.engine.capture import install_capture
from stagetap.engine.configure import options_of
from stagetap.engine.series import check_series

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "stagetap.engine.workers.cpu.TapWorker",
    "vllm.v1.worker.gpu_worker.Worker": "stagetap.engine.workers.gpu.TapWorker",
}
"""The platform's own worker class, and the class that stands in for it."""


class CapturesTaps:
    """Mixed in before a vLLM worker class."""

    vllm_config: Any
    model_runner: Any

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as vLLM does, then hook it.

        Raises:
            Refused: the patch series or the loaded model is not what StageTap needs.
        """
        check_series()
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        install_capture(
            self.model_runner.get_model(), self.vllm_config, options_of(self.vllm_config).layers
        )
