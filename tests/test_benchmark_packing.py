"""The packing benchmark at its smallest: both layouts compute the same tokens, and the line says which was faster."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_both_layouts_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parents[1] / "benchmarks" / "packing.py"
    spec = importlib.util.spec_from_file_location("packing", path)
    assert spec is not None
    assert spec.loader is not None
    packing = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "packing", packing)
    spec.loader.exec_module(packing)
    monkeypatch.setenv("ROUNDS", "1")
    monkeypatch.setenv("MODELS", "tiny")
    monkeypatch.setattr(packing, "COUNTS", {"tiny": 12})
    monkeypatch.setattr(packing.torch, "set_num_threads", lambda count: None)
    packing.main()
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(line["tiny"]) == set(packing.LENGTHS)
    for found in line["tiny"].values():
        assert found["packed_over_padded"] > 0
        assert 0 <= found["packed_padding_share"] < 1
