"""Flags win over everything, and say so when they are wrong."""

import pytest

from cli.context import Context, Format
from cli.flags import make_context, settings_lines
from schemas.errors import InputError, SettingsError
from schemas.settings import load_settings


def context(*assignments, **flags):
    return make_context(
        flags=flags.get("flags", {}),
        config=None,
        assignments=assignments,
        format=Format.TERMINAL,
        output=None,
        quiet=True,
    )


def test_any_setting_can_be_set_and_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("KVQUILT_SERVE__PORT", "1")
    made = context("serve.port=2", "model.name=12e3", 'serve.api_keys={"k": acme}')
    assert (made.settings.serve.port, made.settings.model.name) == (2, "12e3")
    assert made.settings.serve.api_keys == {"k": "acme"}


def test_a_short_form_is_a_flag_and_set_wins_over_it():
    made = context("serve.port=2", flags={"serve.port": 1, "serve.host": "::1"})
    assert (made.settings.serve.port, made.settings.serve.host) == (2, "::1")


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("serve.port", "is not of the form key=value"),
        ("=1", "is not of the form key=value"),
        ("serve.prot=1", "serve.prot: Extra inputs are not permitted"),
        ("serve.port=many", "serve.port: Input should be a valid integer"),
        ("serve.api_keys={broken", "is not YAML"),
    ],
)
def test_a_wrong_assignment_is_refused(assignment, said):
    with pytest.raises(SettingsError) as refused:
        context(assignment)
    assert said in str(refused.value)


def test_a_section_that_was_set_to_a_value_is_refused():
    with pytest.raises(SettingsError, match="serve was set to a single value before"):
        context("serve=1", "serve.port=2")


def test_what_is_printed_at_start_has_one_line_for_each_section_and_no_secret():
    text = settings_lines(load_settings({"qdrant": {"api_key": "s3cr3t"}, "prompt": {"separator": "\n\n"}}))
    lines = text.splitlines()
    assert lines[0] == "settings"
    assert len(lines) == 1 + len(load_settings().redacted())
    assert "s3cr3t" not in text


def test_a_result_goes_to_the_file_that_output_names(tmp_path, capsys):
    file = tmp_path / "result.json"
    Context(load_settings(), Format.JSON, file).result({"a": "ü"}, "text")
    assert file.read_text() == '{"a": "ü"}\n'
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="cannot be written: No such file or directory"):
        Context(load_settings(), output=tmp_path / "no" / "such").result({}, "text")
