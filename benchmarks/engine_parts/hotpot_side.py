"""Our side: the embedded engine, driven through the engine protocol by a loop in its process.

A round of episodes submits the next step of each as soon as the one before it is answered. Beside its seconds, a round says
how many prompt tokens were reused, what share of the time was neither forward pass nor sampling (null where the engine can't be
timed), and how long its floating-point operations would take at the speed of a large square product.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine_parts.floor import operations, product_speed
from engine_parts.processes import serve
from engine_parts.spans import overhead, totals
from engine_parts.work import BatchSizes, Episode, EpisodeSizes, Text, batch, episodes
from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.models import PolicyTokenizer, load_decoder, use_threads
from hotpot.types import Generation, GenerationRequest, Purpose, SampleKey, SamplingParams

SAMPLING = SamplingParams(temperature=1.0)
WARM = 1_000_000
"""The round's number that warms up; no other has it."""


@dataclass(slots=True)
class Tally:
    """What was asked and answered in a round, in tokens; ``seen`` sums over computed tokens how many each attends to."""

    prompt: int = 0
    reused: int = 0
    computed: int = 0
    sampled: int = 0
    seen: int = 0

    def add(self, prompt: int, answer: Generation) -> None:
        """Count one answer to ``prompt`` tokens. Its last token is sampled and not computed."""
        reused, sampled = answer.report.reused_tokens, len(answer.tokens)
        end = prompt + sampled - 1
        self.prompt += prompt
        self.reused += reused
        self.computed += end - reused
        self.sampled += sampled
        self.seen += (end * (end + 1) - reused * (reused + 1)) // 2


class HotpotSide:
    """The engine with one of its settings; ``settings``: folder, threads, engine (its section), kind, sizes, and,
    where they are on, nonces and exact."""

    def __init__(self, settings: dict[str, Any]) -> None:
        use_threads(settings["threads"])
        folder = Path(settings["folder"])
        decoder = load_decoder(folder)
        self.config, self.text = decoder.config, Text(PolicyTokenizer.load(folder))
        self.kind, self.nonces = settings["kind"], bool(settings.get("nonces"))
        sizes = settings["sizes"]
        self.sizes = EpisodeSizes(**sizes) if self.kind == "episodes" else BatchSizes(**sizes)
        longest = self.sizes.longest + self.sizes.sampled
        self.engine = EmbeddedEngine(
            decoder.config,
            decoder.state_dict(),
            settings=EngineSection(**settings["engine"]),
            max_context_tokens=min(longest, decoder.config.max_context_tokens),
            sampling={Purpose.TRAINING: SAMPLING},
            **({"exact": True} if settings.get("exact") else {}),
        )
        self._issued = 0

    def __call__(self, told: dict[str, Any]) -> dict[str, Any]:
        """Do what is told; return what it took."""
        if told["do"] == "warm":
            return self._timed(WARM, short=True)
        return self._timed(int(told["number"]), short=False)

    def _timed(self, number: int, *, short: bool) -> dict[str, Any]:
        speed_before = product_speed()
        before = totals(self.engine)
        started, tally = time.perf_counter(), self._play(number, short=short)
        seconds = time.perf_counter() - started
        share = overhead(before, totals(self.engine), seconds)
        speed = (speed_before + product_speed()) / 2
        needed = operations(self.config, computed=tally.computed, sampled=tally.sampled, seen=tally.seen)
        return {
            "seconds": seconds,
            "prompt": tally.prompt,
            "reused": tally.reused,
            "sampled": tally.sampled,
            "overhead": share,
            "floor_s": needed / speed,
            "gflops": speed / 1e9,
        }

    def _play(self, number: int, *, short: bool) -> Tally:
        if isinstance(self.sizes, EpisodeSizes):
            sizes = replace(self.sizes, steps=1, sampled=min(4, self.sizes.sampled)) if short else self.sizes
            playing = episodes(self.text, sizes, number)
        else:
            sizes = replace(self.sizes, sampled=4) if short else self.sizes
            playing = [
                Episode(number=index, context=prompt, observations=(), sampled=sizes.sampled)
                for index, prompt in enumerate(batch(self.text, sizes, number))
            ]
        return self._drive(playing, number)

    def _drive(self, playing: Sequence[Episode], number: int) -> Tally:
        tally = Tally()
        asked = {self._submit(episode, number): episode for episode in playing}
        while asked:
            for answer in self.engine.step():
                episode = asked.pop(answer.request_id)
                tally.add(len(episode.context), answer)
                if episode.take(answer.tokens.tolist()):
                    asked[self._submit(episode, number)] = episode
        return tally

    def _submit(self, episode: Episode, number: int) -> str:
        self._issued += 1
        prompt = np.array(episode.context, dtype=np.int32)
        if self.nonces:  # a first token of its own: nothing computed before can be reused
            prompt[0] = self._issued % self.config.vocab_size
        request = GenerationRequest(
            request_id=str(self._issued),
            session_id=f"{number}.{episode.number}",
            prompt=prompt,
            stop_tokens=(),
            max_tokens=episode.sampled,
            purpose=Purpose.TRAINING,
            sampling=SAMPLING,
            key=SampleKey(seed=number, issue=episode.number, sample=0, step=episode.step),
        )
        self.engine.submit(request)
        return request.request_id


if __name__ == "__main__":
    serve(HotpotSide)
