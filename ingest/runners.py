"""Which Beam runner a batch job runs on, with Beam's own options; and where its workers are.

`local` is Beam's `FnApiRunner`: named explicitly, since `DirectRunner` tries to download another one first. Workers
that are in this process use its parts and tell how far they are. Others make parts of their own from the settings, so
every store must be one that several processes share, and what happened is known from Beam's metrics at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.metrics import MetricsFilter
from apache_beam.options.pipeline_options import (
    DebugOptions,
    DirectOptions,
    PipelineOptions,
    PortableOptions,
    SetupOptions,
)
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.runners.runner import PipelineState, create_runner
from apache_beam.transforms.environments import PythonLoopbackEnvironment

from schemas.errors import InputError, KvquiltError, SettingsError, StoreError
from schemas.settings import Settings

LOCAL = "local"
NAMESPACE = "kvquilt"  # of our metrics in Beam
_DOWNLOADS = {"DirectRunner", "SwitchingDirectRunner"}


@dataclass(frozen=True)
class Runner:
    """A runner by name, and options as Beam's own programs take them, such as `--flink_master=host:8081`.

    Raises:
        InputError: there is no such runner, or it would be another one than its name says.
    """

    name: str = LOCAL
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name in _DOWNLOADS:
            raise InputError(
                f"runner {self.name} is Beam's choice among others, one of which it downloads; name {LOCAL} "
                "(FnApiRunner in this process) or PrismRunner"
            )

    def __str__(self) -> str:
        name = "FnApiRunner" if self.name == LOCAL else self.name
        where = "in this process" if self.is_here else "in processes of its own"
        return " ".join([f"{name}, workers {where}", *([f"({' '.join(self.options)})"] if self.options else [])])

    @property
    def is_here(self) -> bool:
        """Whether the workers are threads of this process.

        Raises:
            InputError: there is no such runner, or it does not take the options.
        """
        options = self._options()
        if self.name in (LOCAL, "FnApiRunner"):
            return bool(options.view_as(DirectOptions).direct_running_mode != "multi_processing")
        if options.view_as(DebugOptions).lookup_experiment("use_loopback_process_worker", False):
            return False
        kind = options.view_as(PortableOptions).environment_type
        return bool(kind == "LOOPBACK" if kind else self._is_here_by_default(options))

    def check(self, settings: Settings) -> None:
        """Raise `SettingsError` where a store belongs to this process and the workers are elsewhere."""
        if self.is_here:
            return
        if not settings.qdrant.url:
            raise SettingsError(
                f"runner {self}: Qdrant's local mode belongs to one process; name a server in qdrant.url"
            )
        if settings.blobs_url.startswith("memory:"):
            raise SettingsError(f"runner {self}: blobs.url {settings.blobs_url} is in the memory of one process")

    def run(self, build: Callable[[beam.Pipeline], Any]) -> Mapping[str, int]:
        """Build a pipeline and run it to its end; gives the counters in `NAMESPACE`.

        Raises:
            InputError: there is no such runner.
            StoreError: the runner failed, or a store did.
        """
        try:
            pipeline = beam.Pipeline(runner=self._runner(), options=self._options())
            build(pipeline)
            result = pipeline.run()
            state = result.wait_until_finish()
        except KvquiltError:
            raise
        except Exception as error:
            if self.name == LOCAL:
                raise  # a step of ours: what it raised says it
            raise StoreError(f"runner {self}: {error}") from error
        if state not in (PipelineState.DONE, None):
            raise StoreError(f"runner {self}: the job ended as {state}")
        found = result.metrics().query(MetricsFilter().with_namespace(NAMESPACE))
        counts: Counter[str] = Counter()  # one name may be counted in several steps
        for counter in found["counters"]:
            counts[counter.key.metric.name] += counter.result or 0
        return counts

    def _is_here_by_default(self, options: PipelineOptions) -> bool:
        """Where Beam puts the workers when nothing is said: with Flink, it depends on where Flink is."""
        runner = self._runner()
        if not isinstance(runner, PortableRunner):
            return False
        options.view_as(SetupOptions).prebuild_sdk_container_engine = None  # a question builds no image
        return isinstance(runner.default_environment(options), PythonLoopbackEnvironment)

    def _runner(self) -> Any:
        if self.name == LOCAL:
            return FnApiRunner()
        try:
            return create_runner(self.name)
        except (ValueError, ImportError) as error:
            raise InputError(f"runner {self.name}: {error}") from error

    def _options(self) -> PipelineOptions:
        try:  # an empty list is not the same as none: Beam would read `sys.argv`
            options = PipelineOptions(list(self.options))
            options.get_all_options()  # they are read when they are asked for
        except SystemExit as error:  # argparse has said why
            raise InputError(f"Beam does not take the options {' '.join(self.options)}") from error
        return options
