"""Saves the prefixes and sessions of an engine, and restores them in its successor.

The pages are in the remote store, addressed by their contents. A save holds the prefixes' tokens in
the order of their use, and the open sessions with the pixels of their images. It is one step of an
orbax checkpoint, so it is written completely or not at all. The last two saves are kept.
"""

import hashlib
import logging
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orbax.checkpoint as ocp

from sgl_jax.core.array_codec import make_decoder, make_encoder
from sgl_jax.core.daemon_thread import DaemonThread
from sgl_jax.core.private_files import make_private_folder
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.engine.loop.offload_transfers import OffloadTransfers
from sgl_jax.executor.store_transfers import StoreTransfers
from sgl_jax.mem_cache.offload.saved_prefixes import SavedTree, saved_prefixes
from sgl_jax.scheduler.events import RestoreCache
from sgl_jax.scheduler.scheduler import Scheduler
from sgl_jax.sessions.images import KnownImage
from sgl_jax.sessions.saving import SavedSession

logger = logging.getLogger(__name__)

_NUM_KEPT = 2
# Timeout of `close` for the store, and again for a save.
_CLOSE_LIMIT_S = 60.0
_FOLDER = "saved_cache_2"  # increment the number for each change of the format


class SavedCache(msgspec.Struct, frozen=True):
    sessions: list[SavedSession]
    trees: list[SavedTree]
    images: list[KnownImage]


class SavedCacheFolder:
    """The saves in `folder`, each with the fingerprint of its model, weights and layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = (folder / _FOLDER).absolute()

    def _manager(self) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_NUM_KEPT, create=True, enable_async_checkpointing=False
        )
        return ocp.CheckpointManager(self._folder, options=options)

    def save(self, saved: SavedCache, fingerprint: str) -> None:
        """Write a step. Raises OSError or ValueError if it cannot be written."""
        make_private_folder(self._folder)
        packed = make_encoder().encode(saved)
        facts = {"fingerprint": fingerprint, "digest": _digest(packed)}
        with self._manager() as manager:
            step = 1 + (manager.latest_step() or 0)
            arrays = {"packed": np.frombuffer(packed, np.uint8)}
            manager.save(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(arrays), facts=ocp.args.JsonSave(facts)
                ),
            )

    def load(self, fingerprint: str) -> SavedCache | None:
        """Return the last complete save with this fingerprint; if none, log why and return None."""
        try:
            return self._load(fingerprint)
        except Exception:  # of any type: the folder may hold anything
            logger.exception("the saved cache in %s cannot be read: not restored", self._folder)
            return None

    def _load(self, fingerprint: str) -> SavedCache | None:
        if not self._folder.is_dir():
            logger.info("no saved cache in %s", self._folder)
            return None
        with self._manager() as manager:
            for step in sorted(manager.all_steps(), reverse=True):
                try:
                    facts, packed = _read(manager, step)
                    if facts["digest"] != _digest(packed):
                        raise ValueError("its digest is another one")
                    if facts["fingerprint"] != fingerprint:
                        logger.warning(
                            "the saved cache in %s is of other weights, another layout or version: "
                            "not restored",
                            self._folder,
                        )
                        return None
                    saved: SavedCache = make_decoder(SavedCache).decode(packed)
                except Exception as error:  # of any type: files may hold anything
                    text = str(error).splitlines()[0] if str(error) else type(error).__name__
                    logger.warning("saved cache %s/%d cannot be read: %s", self._folder, step, text)
                else:
                    return saved
        return None


def _read(manager: ocp.CheckpointManager, step: int) -> tuple[dict[str, Any], bytes]:
    restored = manager.restore(
        step,
        args=ocp.args.Composite(arrays=ocp.args.StandardRestore(), facts=ocp.args.JsonRestore()),
    )
    return restored.facts, np.asarray(restored.arrays["packed"]).tobytes()


def _digest(packed: bytes) -> str:
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


class CacheSaver:
    """Saves the cache of `scheduler` in `args.restore_cache`: on a call, every
    `args.save_cache_interval` minutes, and at the end."""

    def __init__(
        self,
        args: ServerArgs,
        store: StoreTransfers,
        scheduler: Scheduler,
        transfers: OffloadTransfers,
    ) -> None:
        assert args.restore_cache is not None, "else nothing is saved"
        self._folder = SavedCacheFolder(Path(args.restore_cache))
        self._store = store
        self._scheduler = scheduler
        self._transfers = transfers
        self._interval_s = 60.0 * args.save_cache_interval
        self._next_s = time.monotonic() + self._interval_s
        self._thread = DaemonThread("cache saver")
        self._last: Future[int] | None = None

    def restore(self) -> None:
        saved = self._folder.load(self._store.fingerprint)
        if saved is None:
            return
        prefixes = saved_prefixes(saved.trees)
        num_lost = self._scheduler.handle(RestoreCache(saved.sessions, prefixes, saved.images))
        logger.info(
            "restoring %d prefixes and %d sessions; %d found no room",
            *(len(prefixes), len(saved.sessions), num_lost),
        )

    def save(self) -> "Future[int]":
        """Save the cache on another thread. The future holds the number of saved tokens."""
        scheduler = self._scheduler
        trees, images = scheduler.offload.saved_trees(), scheduler.saved_images()
        saved = SavedCache(scheduler.saved_sessions(), trees, images)
        self._last = self._thread.submit(self._write, saved, self._store.fingerprint)
        return self._last

    def _write(self, saved: SavedCache, fingerprint: str) -> int:
        begin_s = time.monotonic()
        self._folder.save(saved, fingerprint)
        num_tokens = sum(len(tree.tokens) for tree in saved.trees)
        logger.info(
            "saved %d tokens of prefixes and %d sessions in %.1f s",
            *(num_tokens, len(saved.sessions), time.monotonic() - begin_s),
        )
        return num_tokens

    def save_if_due(self, now_s: float) -> None:
        """Save if the interval has passed and the last save has ended. A failure is logged."""
        if not self._interval_s or now_s < self._next_s:
            return
        if self._last is not None and not self._last.done():
            return
        self._next_s = now_s + self._interval_s
        self.save().add_done_callback(_log_failure)

    def close(self) -> None:
        """Save, wait for the transfers to the store, and save again. Each wait has a limit."""
        # The first save counts if the store is so slow that the engine is killed before the second.
        self.save().add_done_callback(_log_failure)
        try:
            self._transfers.settle(_CLOSE_LIMIT_S)
            self.save().add_done_callback(_log_failure)
        finally:
            self._thread.close()
            if self._last is not None and wait_for([self._last], _CLOSE_LIMIT_S).not_done:
                logger.error("the cache was not saved within %.0f s", _CLOSE_LIMIT_S)


def _log_failure(saved: "Future[int]") -> None:
    error = saved.exception()
    if error is not None:
        logger.error("the cache could not be saved", exc_info=error)
