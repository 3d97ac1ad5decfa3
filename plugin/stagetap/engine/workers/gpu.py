"""The GPU worker with capture."""

from vllm.v1.worker.gpu_worker import Worker

from stagetap.engine.workers import CapturesTaps


class TapWorker(CapturesTaps, Worker):
    """Chosen by the configuration hook on the CUDA platform."""
