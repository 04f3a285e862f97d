"""One frozen settings object per process: flag > environment (`KVQUILT_…`) > YAML file > default.

`load_settings` is the only place that reads the environment or a file; it runs once, at the edge. Unknown keys
and wrong values stop the process with the key, the value and what was expected.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import (
    SettingsError as EnvironmentSyntaxError,
)

from schemas.errors import SettingsError
from schemas.events import describe
from schemas.places import all_without_userinfo, check_place

ENV_PREFIX = "KVQUILT_"
FILE_VARIABLE = "KVQUILT_CONFIG_FILE"
MAX_S = 1_000_000_000  # for all times; thirty years
TEST_PREFIX = "KVQUILT_TEST_"  # the test suite's own; never settings


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_a_time(cls, value: object, info: ValidationInfo) -> object:
        """What waits counts in nanoseconds of 64 bits, and fails on more with an error of its own."""
        if str(info.field_name).endswith("_s") and isinstance(value, float) and value > MAX_S:
            raise ValueError(f"at most {MAX_S:,} seconds")
        return value


class KafkaSettings(_Section):
    """The broker and the topics. An empty `bootstrap` means the embedded broker of `kvquilt up`."""

    bootstrap: str = ""
    documents_topic: str = "documents"
    commits_topic: str = "kvquilt.commits"
    group: str = "kvquilt"
    partitions: int = Field(default=4, ge=1)
    replication: int = Field(default=1, ge=1)
    session_timeout_s: float = Field(default=10.0, ge=1, le=1800)  # a silent process of a group is given up after it
    group_instance_id: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,249}$")  # static membership; "": none
    security: dict[str, Any] = Field(default_factory=dict)  # passed to kafka-python: security_protocol, sasl_…

    @property
    def dead_letter_topic(self) -> str:
        """Where events go that cannot be processed."""
        return f"{self.documents_topic}.dlq"

    def group_of(self, pipeline: str) -> str:
        """The consumer group of a pipeline: `index` or `prefill`."""
        return f"{self.group}.{pipeline}"

    @model_validator(mode="after")
    def _no_auto_commit(self) -> KafkaSettings:
        if any(name.replace(".", "_") == "enable_auto_commit" for name in self.security):
            raise ValueError("enable_auto_commit is refused: offsets are committed only after the effects")
        return self


class QdrantSettings(_Section):
    """A server by URL, or, without one, local mode in `<data_dir>/qdrant`. `:memory:` keeps nothing."""

    url: str = ""
    api_key: SecretStr | None = None
    prefix: str = "kvquilt"
    timeout_s: float = Field(default=10.0, gt=0)


class BlobSettings(_Section):
    """The object store: a folder (`file:///…`), `s3://bucket/prefix`, `gs://…` or `memory://`.

    Empty means `<data_dir>/blobs`. `options` go to obstore as they are (endpoint, region, access_key_id, …).
    """

    url: str = ""
    options: dict[str, str] = Field(default_factory=dict)


class ModelSettings(_Section):
    """The LLM: a Hugging Face name, a folder or a GGUF file; `smollm2` is the packaged default."""

    name: str = "smollm2"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    max_prompt_tokens: int = Field(default=8192, ge=64)
    threads: int = Field(default=0, ge=0)  # 0: torch's own choice


class EmbedderSettings(_Section):
    """The text encoder: a sentence-transformers name or folder; `minilm` is the packaged default."""

    name: str = "minilm"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # not part of the generation: cosines over 0.9998
    device: str = "cpu"
    batch_size: int = Field(default=32, ge=1)


class ChunkerSettings(_Section):
    """How documents are cut; part of the generation."""

    max_tokens: int = Field(default=512, ge=16, le=8192)


class PromptSettings(_Section):
    """The fixed text of the prompt. Part of the generation: chunks are prefilled behind `system`."""

    system: str = (
        "You answer questions from the passages below. Use only what they say, in one or two sentences. "
        "If they do not hold the answer, say that you do not know."
    )
    separator: str = "\n\n"
    segments: dict[str, str] = Field(default_factory=dict)  # more fixed text behind `system`, by name: tools, examples

    @property
    def fixed_text(self) -> str:
        """What stands in front of the passages: `system` and the segments, in their order."""
        return "\n\n".join(text for text in (self.system, *self.segments.values()) if text)

    @field_validator("segments")
    @classmethod
    def _not_empty(cls, segments: dict[str, str]) -> dict[str, str]:
        for name, text in segments.items():
            if not name.strip() or not text.strip():
                raise ValueError(f"segment {name!r} has no name or no text")
        return segments


class RegistrySettings(_Section):
    """The schema registry (Confluent's REST API) for values that are framed with a schema id."""

    url: str = ""
    username: str = ""
    password: SecretStr | None = None
    token: SecretStr | None = None  # sent as a bearer token instead
    timeout_s: float = Field(default=5.0, gt=0)


class FetchSettings(_Section):
    """Content by reference. Nothing is fetched unless `allow` names where from."""

    allow: tuple[str, ...] = ()  # scheme://host[:port][/folder]: https, http, s3, gs, file
    private_hosts: tuple[str, ...] = ()  # may resolve to private, loopback and link-local addresses
    max_bytes: int = Field(default=32 * 1024 * 1024, ge=1)
    timeout_s: float = Field(default=30.0, gt=0)
    options: dict[str, dict[str, str]] = Field(default_factory=dict, repr=False)  # scheme://bucket -> obstore options

    @field_validator("allow")
    @classmethod
    def _places(cls, allow: tuple[str, ...]) -> tuple[str, ...]:
        for place in allow:
            check_place(place)
        return allow


class FieldSettings(_Section):
    """Which field or column of a record is what. Empty: the records have no such field."""

    id: str = ""  # empty: the message key is the id
    tenant: str = "tenant"
    version: str = "version"
    content: str = "content"
    content_type: str = "content_type"
    title: str = "title"
    uri: str = "uri"
    digest: str = "sha256"
    metadata: tuple[str, ...] = ("metadata",)


class CloudEventSettings(_Section):
    """Extension attributes of CloudEvents, and which types delete."""

    version: str = "sequence"
    tenant: str = "tenant"
    deleting_types: tuple[str, ...] = ()


class DebeziumSettings(_Section):
    """Debezium envelopes."""

    version: str = "lsn"  # a field of `source`; `ts_ms` for databases without; empty: the order of the messages


class EventSettings(_Section):
    """Events in other formats than our own JSON; see docs/events.md."""

    registry: RegistrySettings = RegistrySettings()
    fetch: FetchSettings = FetchSettings()
    fields: FieldSettings = FieldSettings()
    cloudevents: CloudEventSettings = CloudEventSettings()
    debezium: DebeziumSettings = DebeziumSettings()


class IngestSettings(_Section):
    """The two pipelines."""

    batch_documents: int = Field(default=16, ge=1)
    batch_tokens: int = Field(default=4096, ge=16)  # chunk tokens per prefill forward pass
    poll_s: float = Field(default=0.25, gt=0)
    round_bundles: int = Field(default=2000, ge=1)  # drain and re-run the runner after so many bundles
    round_s: float = Field(default=300.0, gt=0)
    max_attempts: int = Field(default=6, ge=1)
    backoff_s: float = Field(default=0.5, gt=0)
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=0, ge=0, le=65535)  # /healthz, /readyz, /metrics of `ingest index|prefill`; 0: none


class PrefillSettings(_Section):
    """How the KV rows of a chunk are computed; `variant`, company and neighbours are part of the generation."""

    variant: Literal["shared_prefix", "alone", "bos", "dummy_prefix", "company", "fused", "fused_company"] = (
        "shared_prefix"
    )
    company: Path | None = None  # a text file; None: the packaged text
    neighbours: int = Field(default=10, ge=1, le=64)
    max_changes_per_day: int = Field(default=4, ge=0, le=32)  # a document that changes more often is not fused
    nice: int = Field(default=10, ge=0, le=19)  # how far its passes step back behind everything else on the machine


class GenerationSettings(_Section):
    """Generations beside the live one."""

    grace_s: float = Field(default=86_400.0, ge=0)  # kept so long after it was built or was live: time to roll back
    lease_s: float = Field(default=60.0, ge=1)  # who uses one and is silent for so long holds it no more
    check_s: float = Field(default=2.0, gt=0)  # how often a serving replica looks which one is live


class QualitySettings(_Section):
    """Evaluation and certificates."""

    max_kl: float = Field(default=0.05, gt=0)  # nats; what a policy's certified KL must stay under
    data_dir: Path | None = None  # question sets by name are looked for here
    cache_bytes: int = Field(default=16_000_000_000, ge=0)  # of rows kept in <cache_dir>/quality


class ServeSettings(_Section):
    """The HTTP service. Without `api_keys` every caller is the tenant `default`."""

    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    api_keys: dict[str, str] = Field(default_factory=dict, repr=False)  # key -> tenant
    k: int = Field(default=4, ge=1, le=64)
    max_tokens: int = Field(default=128, ge=1)
    max_concurrent: int = Field(default=2, ge=1)
    max_queue: int = Field(default=32, ge=0)
    load_timeout_s: float = Field(default=5.0, gt=0)
    send_timeout_s: float = Field(default=30.0, gt=0)  # a client that reads nothing of its stream for so long is gone
    host_tier_bytes: int = Field(default=1_000_000_000, ge=0)  # of KV artifacts in memory; 0: none are kept
    prefix_cache_bytes: int = Field(default=500_000_000, ge=0)  # of rows of whole prompts; 0: none are kept
    tier_check_s: float = Field(default=5.0, gt=0)  # how often both are compared with the heads without the topic


class ClientSettings(_Section):
    """The commands that ask a running service. Without `url`: the `kvquilt up` of this data folder, else port 8080."""

    url: str = ""
    api_key: SecretStr | None = None
    timeout_s: float = Field(default=60.0, gt=0)


class Settings(BaseSettings):
    """Every setting of every process."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter="__", validate_default=True
    )

    data_dir: Path = Path("kvquilt-data")
    cache_dir: Path = Path("~/.cache/kvquilt")
    kafka: KafkaSettings = KafkaSettings()
    qdrant: QdrantSettings = QdrantSettings()
    blobs: BlobSettings = BlobSettings()
    model: ModelSettings = ModelSettings()
    embedder: EmbedderSettings = EmbedderSettings()
    chunker: ChunkerSettings = ChunkerSettings()
    prompt: PromptSettings = PromptSettings()
    events: EventSettings = EventSettings()
    ingest: IngestSettings = IngestSettings()
    prefill: PrefillSettings = PrefillSettings()
    generations: GenerationSettings = GenerationSettings()
    quality: QualitySettings = QualitySettings()
    serve: ServeSettings = ServeSettings()
    client: ClientSettings = ClientSettings()

    @property
    def cache_folder(self) -> Path:
        """Where converted models and measurements are kept between runs."""
        return self.cache_dir.expanduser()

    @property
    def blobs_url(self) -> str:
        """The object store's URL, with the default filled in."""
        return self.blobs.url or (self.data_dir.expanduser().resolve() / "blobs").as_uri()

    @property
    def qdrant_location(self) -> str:
        """A URL, `:memory:` or the folder of local mode."""
        return self.qdrant.url or str(self.data_dir.expanduser().resolve() / "qdrant")

    def redacted(self) -> dict[str, Any]:
        """All settings as plain values, without secrets: what is printed at start and served at /config to any tenant.

        Of `serve.api_keys` only how many there are: whose they are is no tenant's business. URLs are without userinfo.
        """
        plain: dict[str, Any] = self.model_dump(mode="json")
        plain["serve"]["api_keys"] = len(self.serve.api_keys)
        plain["kafka"]["security"] = dict.fromkeys(self.kafka.security, "**********")
        plain["blobs"]["options"] = dict.fromkeys(self.blobs.options, "**********")
        secret = {place: dict.fromkeys(options, "**********") for place, options in self.events.fetch.options.items()}
        plain["events"]["fetch"]["options"] = secret
        shown: dict[str, Any] = all_without_userinfo(plain)
        return shown

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags (init) first, then the environment, then the file's values, which `load_settings` hands over."""
        assert isinstance(init_settings, InitSettingsSource)
        file_values = init_settings.init_kwargs.pop("_file_values", {})
        return init_settings, env_settings, InitSettingsSource(settings_cls, file_values)


def load_settings(flags: Mapping[str, Any] | None = None, file: Path | None = None) -> Settings:
    """Merge flags, environment, file and defaults.

    Args:
        flags: nested values from the command line, such as `{"model": {"name": "…"}}`.
        file: a YAML file; without one, the file that `KVQUILT_CONFIG_FILE` names, if it does.

    Raises:
        SettingsError: an unknown key, a wrong value, or a file that cannot be read.
    """
    _refuse_unknown_variables()
    if file is None and os.environ.get(FILE_VARIABLE):
        file = Path(os.environ[FILE_VARIABLE])
    file_values = _read_file(file) if file is not None else {}
    try:
        return Settings(_file_values=file_values, **(flags or {}))  # type: ignore[call-arg]
    except ValidationError as error:
        raise SettingsError(f"settings: {describe(error)}") from error
    except EnvironmentSyntaxError as error:
        raise SettingsError(f"settings: {error}: {error.__cause__}") from error


def _refuse_unknown_variables() -> None:
    for name in os.environ:
        if not name.startswith(ENV_PREFIX) or name == FILE_VARIABLE or name.startswith(TEST_PREFIX):
            continue
        section = name.removeprefix(ENV_PREFIX).lower().split("__")[0]
        if section not in Settings.model_fields:
            known = ", ".join(f"{ENV_PREFIX}{field.upper()}" for field in Settings.model_fields)
            raise SettingsError(f"environment variable {name} names no setting; known are {known}")


def _read_file(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"settings file {file} cannot be read: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"settings file {file} must hold a mapping (got {type(values).__name__})")
    return values
