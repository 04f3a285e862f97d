"""Settings: flag > environment > file > default, and loud when wrong."""

import os

import pytest

from schemas.errors import SettingsError
from schemas.settings import Settings, load_settings


@pytest.fixture(autouse=True)
def _a_bare_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("KVQUILT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def write(tmp_path):
    def to_file(text: str, name: str = "kvquilt.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return to_file


def test_without_anything_the_defaults_hold():
    settings = load_settings()
    assert settings.model.name == "smollm2"
    assert settings.serve.port == 8080


def test_each_source_wins_over_the_one_below_it(monkeypatch, write):
    file = write("serve: {port: 1, k: 1, max_tokens: 1}\n")
    assert load_settings(file=file).serve.port == 1
    monkeypatch.setenv("KVQUILT_SERVE__PORT", "2")
    monkeypatch.setenv("KVQUILT_SERVE__K", "2")
    settings = load_settings({"serve": {"port": 3}}, file)
    assert (settings.serve.port, settings.serve.k, settings.serve.max_tokens) == (3, 2, 1)


def test_the_file_may_be_named_by_the_environment_and_a_flag_wins(monkeypatch, write):
    monkeypatch.setenv("KVQUILT_CONFIG_FILE", str(write("serve: {port: 1}\n")))
    assert load_settings().serve.port == 1
    assert load_settings(file=write("serve: {port: 2}\n", "other.yaml")).serve.port == 2


def test_a_file_that_is_named_but_cannot_be_read_stops_the_process(tmp_path, monkeypatch):
    """Bug (LMCache#17): a settings file that was not there was silently skipped."""
    monkeypatch.setenv("KVQUILT_CONFIG_FILE", str(tmp_path / "absent.yaml"))
    with pytest.raises(SettingsError, match=r"absent\.yaml cannot be read"):
        load_settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("serve: {port: high}", "serve.port: Input should be a valid integer"),
        ("serve: {port: 99999}", "serve.port: Input should be less than or equal to 65535 (got 99999)"),
        ("serve: {prot: 1}", "serve.prot: Extra inputs are not permitted (got 1)"),
        ("server: {port: 1}", "server: Extra inputs are not permitted"),
        (
            "model: {dtype: int4}",
            "model.dtype: Input should be 'auto', 'float32', 'bfloat16' or 'float16' (got 'int4')",
        ),
        ("kafka: {security: {enable.auto.commit: true}}", "enable_auto_commit is refused"),
        ("- a\n- b", "must hold a mapping (got list)"),
        ("serve: {port: 1", "cannot be read"),
    ],
)
def test_a_wrong_file_names_key_value_and_what_was_expected(write, text, said):
    with pytest.raises(SettingsError) as refused:
        load_settings(file=write(text))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVQUILT_SERVE__PORT", "high", "serve.port: Input should be a valid integer"),
        ("KVQUILT_SERVE__PROT", "1", "serve.prot: Extra inputs are not permitted"),
        ("KVQUILT_SERVR__PORT", "1", "environment variable KVQUILT_SERVR__PORT names no setting"),
        ("KVQUILT_MODEL", "{not json", "model"),
    ],
)
def test_a_wrong_variable_names_itself(monkeypatch, name, value, said):
    """Bug (mini-sglang env.py): a bad value in the environment was swallowed and the default used."""
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as refused:
        load_settings()
    assert said in str(refused.value)


def test_the_variables_of_the_test_suite_are_not_settings(monkeypatch):
    monkeypatch.setenv("KVQUILT_TEST_QDRANT_URL", "http://localhost:6333")
    assert load_settings().qdrant.url == ""


def test_a_wrong_flag_is_refused_too():
    with pytest.raises(SettingsError, match=r"ingest\.batch_documents: Input should be greater than or equal to 1"):
        load_settings({"ingest": {"batch_documents": 0}})


def floats(model, *above):
    for name, field in model.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from floats(field.annotation, *above, name)
        elif field.annotation is float:
            yield (*above, name)


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("path", list(floats(Settings)), ids=".".join)
def test_a_number_that_is_infinite_or_none_is_refused(path, value):
    """Bug: a time-out of `inf` reached a socket as an OverflowError."""
    flags = value
    for name in reversed(path):
        flags = {name: flags}
    with pytest.raises(SettingsError, match=rf"{'.'.join(path)}: Input should be a finite number"):
        load_settings(flags)


@pytest.mark.parametrize("path", [path for path in floats(Settings) if path[-1].endswith("_s")], ids=".".join)
def test_a_time_that_no_clock_can_count_is_refused(path):
    """Bug: 1e300 seconds reached a socket as an OverflowError."""
    flags = 1e300
    for name in reversed(path):
        flags = {name: flags}
    with pytest.raises(SettingsError, match=rf"{'.'.join(path)}.*(at most|less than)"):
        load_settings(flags)


def test_ing_06_auto_commit_is_refused_in_every_spelling():
    """Bug (beam#21742): with auto-commit on, offsets were committed before the effects, and events were lost."""
    for name in ("enable_auto_commit", "enable.auto.commit"):
        with pytest.raises(SettingsError, match="offsets are committed only after the effects"):
            load_settings({"kafka": {"security": {name: True}}})


def test_settings_cannot_be_changed_after_the_start():
    with pytest.raises(ValueError, match="frozen"):
        load_settings().serve.port = 1


def test_what_is_printed_holds_no_secret():
    secret = "s3cr3t"
    settings = load_settings(
        {
            "qdrant": {"api_key": secret},
            "client": {"api_key": secret},
            "serve": {"api_keys": {secret: "acme"}},
            "kafka": {"security": {"sasl_plain_password": secret}},
            "blobs": {"options": {"secret_access_key": secret}},
        }
    )
    assert secret not in str(settings.redacted())
    assert secret not in f"{settings.serve} {settings.qdrant} {settings.client}", "logging a section must be safe too"


def test_what_is_printed_names_no_tenant_and_no_password_in_a_url():
    """Bug: /config showed each tenant the names of all others, and `user:password@` of every URL."""
    url = "https://svc:hunter2@store:8081/x?y=a@b"
    settings = load_settings(
        {
            "serve": {"api_keys": {"k1": "acme", "k2": "globex"}},
            "events": {"registry": {"url": url}, "fetch": {"options": {"s3://me:hunter2@bucket": {"region": "x"}}}},
            **{section: {"url": url} for section in ("blobs", "qdrant", "client")},
            "kafka": {"bootstrap": "PLAIN://a:hunter2@one:1,PLAIN://b:hunter2@two:2"},
        }
    )
    shown = settings.redacted()
    assert shown["serve"]["api_keys"] == 2
    assert {shown[section]["url"] for section in ("blobs", "qdrant", "client")} == {"https://store:8081/x?y=a@b"}
    assert shown["kafka"]["bootstrap"] == "PLAIN://one:1,PLAIN://two:2"
    assert not {word for word in ("acme", "globex", "hunter2", "svc") if word in str(shown)}


def test_the_places_of_the_embedded_mode_lie_in_the_data_folder(tmp_path):
    settings = Settings(data_dir=tmp_path)
    assert settings.qdrant_location == str(tmp_path / "qdrant")
    assert settings.blobs_url == (tmp_path / "blobs").as_uri()
