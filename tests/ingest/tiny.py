"""A tiny random Llama with a tokenizer trained on the spot, as a folder that `ModelSettings.name` may name."""

from pathlib import Path

SYLLABLES = [first + vowel for first in "bdfgklmnprst" for vowel in "aeiou"]


def text(seed: int, n_sentences: int = 3) -> str:
    """Sentences of made-up words; equal seeds, equal text."""
    import numpy as np

    rng = np.random.default_rng(seed)
    words = ["".join(rng.choice(SYLLABLES, 2)) for _ in range(8 * n_sentences)]
    return " ".join(" ".join(words[8 * n : 8 * n + 8]).capitalize() + "." for n in range(n_sentences))


def make_tiny_model(folder: Path) -> Path:
    """Write config, weights and tokenizer; about 100 KB, a forward pass takes a millisecond."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text(seed) for seed in range(50)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
