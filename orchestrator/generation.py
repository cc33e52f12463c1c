"""Generation: runs the samples of a checked request concurrently, and yields the events of its answer as they come.

Knows samples and their errors; does not know how a sample is decoded (orchestrator.sample), deadlines and admission.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

from orchestrator.drafting.text_history import TextHistory
from orchestrator.outbox import Chunk, Event, Outbox
from orchestrator.request import Request
from orchestrator.sample import Answer, Experience, Sample, Services
from orchestrator.sequence import Sequence
from specdec.core.rounds import ModelInfo
from specdec.core.sequence import Priority

_MANY_RECEIVED_IDS = 256


class Generator:
    """Decodes requests with the replicas of two pools."""

    def __init__(self, services: Services) -> None:
        self._services = services
        num_tokens = services.settings.lookup_history
        history = TextHistory(num_tokens) if num_tokens else None
        self._experiences = {is_batch: Experience(history) for is_batch in (False, True)}

    async def events(self, request: Request, target: ModelInfo, arrived: float) -> AsyncGenerator[Event, None]:
        """All events of all samples, by replicas of the model ``target``. ``arrived``: when the request arrived
        (monotonic clock). Raises the first SpecdecError that ends a sample. Closing the generator ends all samples."""
        outbox = Outbox(self._services.settings.park_after_s)
        answer = Answer(request=request, model=target, arrived=arrived, outbox=outbox)
        samples: list[asyncio.Task[None]] = []
        try:
            for index in range(request.output.num_samples):
                samples.append(asyncio.create_task(self._run(answer, index)))
                # Each copies the prompt, and all of them in one turn would hold up other streams.
                await asyncio.sleep(0)
            unfinished = len(samples)
            while unfinished:
                event = await outbox.get()
                unfinished -= isinstance(event, Chunk) and event.finish is not None
                yield event
        finally:
            for sample in samples:
                sample.cancel()
            await asyncio.gather(*samples, return_exceptions=True)

    async def _run(self, answer: Answer, index: int) -> None:
        """Decode one sample into the outbox, with any error."""
        try:
            sequence = await self._sequence(answer.request, index)
            experience = self._experiences[answer.request.priority is Priority.BATCH]
            sample = Sample(sequence, index, answer, services=self._services, experience=experience)
            await sample.run()
        except Exception as error:
            await answer.outbox.fail(error)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception, and must not be lost
            await answer.outbox.fail(RuntimeError(f"a sample failed: {error!r}"))

    async def _sequence(self, request: Request, index: int) -> Sequence:
        new_sequence = partial(Sequence, request, index, tokenizer=self._services.tokenizer)
        if len(request.resume.get(index, ())) <= _MANY_RECEIVED_IDS:
            return new_sequence()
        # Detokenizing many ids takes long and must not block the event loop.
        return await self._services.workers.run(new_sequence, request.caller.account)
