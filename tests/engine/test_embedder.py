"""The packaged text encoder: windows, batches, identity."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5EncoderModel

from engine.embedder import Embedder, embedder_identity, load_embedder
from engine.models import embedder_folder
from schemas.errors import UnsupportedModelError
from schemas.settings import EmbedderSettings

LONG = " ".join(f"Sentence number {n} is about {topic}." for n, topic in enumerate(["rivers", "taxes", "owls"] * 60))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return load_embedder(EmbedderSettings(dtype="float32"), tmp_path_factory.mktemp("cache"))


def test_emb_01_a_long_text_is_embedded_in_windows_and_never_cut(embedder: Embedder) -> None:
    """The encoder takes 256 tokens and would drop the rest of a chunk without a word."""
    windows = embedder.windows(LONG)
    whole = embedder._ids(LONG)
    assert [token for window in windows for token in window] == whole
    assert len(windows) == -(-len(whole) // embedder.window_tokens) > 4
    assert max(map(len, windows)) <= embedder.window_tokens == 254
    assert min(map(len, windows)) > 0.8 * max(map(len, windows))
    (rows,) = embedder.embed([LONG])
    assert rows.shape == (len(windows), embedder.dim)
    tail = embedder.embed_query("Sentence number 179 is about owls.")
    assert float((rows @ tail).max()) > float(rows[0] @ tail)


def test_windows_are_cut_between_words_and_inside_only_where_one_word_fills_a_window(embedder: Embedder) -> None:
    starts = [embedder._tokenizer.id_to_token(window[0]) for window in embedder.windows(LONG)]
    assert not any(token.startswith("##") for token in starts)
    word = "ab" * 700
    windows = embedder.windows(word)
    assert [token for window in windows for token in window] == embedder._ids(word)
    assert max(map(len, windows)) <= embedder.window_tokens


def test_emb_02_vectors_do_not_depend_on_the_neighbours_in_the_batch(embedder: Embedder) -> None:
    texts = ["short", "a somewhat longer text about rivers", LONG, "x", ""]
    together = embedder.embed(texts)
    for text, rows in zip(texts, together, strict=True):
        (alone,) = embedder.embed([text])
        assert alone.shape == rows.shape
        assert float((alone * rows).sum(1).min()) > 0.9999


def test_vectors_are_float32_of_unit_length_and_mean_something(embedder: Embedder) -> None:
    cats, tax = embedder.embed(["Cats purr when they are content.", "The tax is due in April."])
    assert cats.dtype == np.float32
    assert cats.shape == (1, 384)
    np.testing.assert_allclose(np.linalg.norm(np.concatenate([cats, tax]), axis=1), 1, atol=1e-6)
    query = embedder.embed_query("Why do cats purr?")
    assert query.shape == (384,)
    assert float(cats[0] @ query) > 0.5 > float(tax[0] @ query)


def test_a_long_question_is_one_vector(embedder: Embedder) -> None:
    query = embedder.embed_query(LONG)
    assert query.shape == (384,)
    assert abs(float(np.linalg.norm(query)) - 1) < 1e-5


def test_vectors_of_bfloat16_are_those_of_float32_for_every_purpose(tmp_path: Path, embedder: Embedder) -> None:
    """The dtype is not part of the generation: one process may embed documents in one and questions in another."""
    half = load_embedder(EmbedderSettings(dtype="bfloat16"), tmp_path)
    texts = ["Cats purr when they are content.", "The tax is due in April.", LONG, "x"]
    whole, rounded = np.concatenate(embedder.embed(texts)), np.concatenate(half.embed(texts))
    assert rounded.dtype == np.float32
    assert 0.9998 < float((whole * rounded).sum(1).min()) < 1 - 1e-7  # and it is another dtype
    assert float(embedder.embed_query("owls") @ half.embed_query("owls")) > 0.9998
    assert half.sha256 == embedder.sha256


def test_an_encoder_whose_dtype_cannot_be_measured_is_loaded_in_float32(tmp_path: Path) -> None:
    """Bug: with dtype auto an encoder of T5's kind was refused, because it is no causal language model."""
    tokenizer = AutoTokenizer.from_pretrained(embedder_folder("minilm"))
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=len(tokenizer))
    T5EncoderModel(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    spelled = json.loads((tmp_path / "t5" / "config.json").read_text()) | {"is_encoder_decoder": True}  # as published
    (tmp_path / "t5" / "config.json").write_text(json.dumps(spelled))
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "t5" / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "t5" / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (tmp_path / "t5" / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    encoder = load_embedder(EmbedderSettings(name=str(tmp_path / "t5")), tmp_path / "cache")
    assert encoder.embed_query("owls").shape == (32,)
    assert encoder._model.dtype == torch.float32


def test_no_texts_are_no_vectors(embedder: Embedder) -> None:
    assert embedder.embed([]) == []


def test_the_vectors_are_those_of_sentence_transformers(tmp_path: Path, embedder: Embedder) -> None:
    """Same pooling, same special tokens: within fp32 rounding of the library's own `encode`."""
    texts = ["Cats purr when they are content.", "The tax is due in April."]
    fresh = load_embedder.__globals__["_load"].__wrapped__(EmbedderSettings(dtype="float32"), tmp_path)._model
    fresh.tokenizer.backend_tokenizer.enable_padding()
    theirs = np.stack([fresh.encode(text) for text in texts])
    np.testing.assert_allclose(np.concatenate(embedder.embed(texts)), theirs, atol=2e-6)


def test_the_identity_is_known_without_loading_and_remembered(tmp_path: Path, embedder: Embedder) -> None:
    first = embedder_identity(EmbedderSettings(), tmp_path)
    assert first == embedder_identity(EmbedderSettings(), tmp_path)
    assert (
        (first.name, first.sha256, first.dim)
        == (embedder.name, embedder.sha256, embedder.dim)
        == (
            "minilm",
            first.sha256,
            384,
        )
    )
    assert any((tmp_path / "digests").iterdir())


def test_an_unknown_embedder_is_refused_with_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="no such folder"):
        load_embedder(EmbedderSettings(name=str(tmp_path / "nothing")), tmp_path)
