"""Celery tasks that run under a lock.

    >>> from celery import Celery
    >>> from leasehold.celery import GpuTask, locked_task
    >>> app = Celery("shop", broker="memory://")
    >>> app.conf.leasehold_store = "memory:"  # redis://…; left out: LEASEHOLD_STORE, or a Redis broker itself

    One run per order at a time; a second run is skipped, and its result names the holder:

    >>> @locked_task(key="task_lock:{order_id}", app=app)
    ... def pay(order_id):
    ...     return f"order {order_id} is paid"
    >>> pay.apply(args=[42]).get()
    'order 42 is paid'

    One task at a time on a GPU; other tasks wait:

    >>> @app.task(base=GpuTask, max_wait_time=1800)
    ... def transcribe(file, gpu_id=0):
    ...     return f"{file} on GPU {gpu_id}"
    >>> transcribe.apply(args=["talk.wav"], kwargs={"gpu_id": 1}).get()
    'talk.wav on GPU 1'

The lock is released when the task returns, fails, retries, is revoked or exceeds a time limit, and when the worker shuts down.
When a pool process is killed, its worker releases the locks that the process held. When the whole machine fails, the lease
expires. A task that ends late never releases its successor's lock.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from string import Formatter
from typing import Any, Literal, TypeAlias, overload

from celery import Task, shared_task, signals, uuid
from celery.exceptions import Ignore

from . import gpu
from ._client import Client, connect
from ._config import load
from ._errors import InvalidArgument, LockNotAcquired, NotEvicted, StoreUnavailable
from ._gpu_manager import SmartGpuLockManager
from ._gpu_settings import client_of, gpu_number, this_host
from ._reentry import EnteredLocks
from ._lock import Guard, OnLost, release_everything
from ._arguments import OnUnavailable, Seconds, flag, optional_lease, optional_seconds, seconds, text

__all__ = ["GpuTask", "LockedTask", "locked_task"]

WhenHeld: TypeAlias = Literal["skip", "wait", "retry"]

log = logging.getLogger("leasehold")


class LockedTask(Task):  # type: ignore[misc]
    """A base for tasks that run under a lock: ``@app.task(base=LockedTask, lock_key="task_lock:{order_id}")``.

    Its attributes are options of ``@app.task``, and :func:`locked_task` names them shorter.
    """

    # The request class of the worker, which releases the locks of a pool process that ended.
    Request = "leasehold._celery_request:LockedRequest"

    #: The name of the lock, with fields in braces: the task's arguments by name, ``{task_id}``, ``{task_name}``.
    lock_key: str = "task_lock:{task_id}"
    #: What happens when the lock is held. ``"skip"``: the task does not run, and its result names the holder. ``"wait"``: the
    #: task waits for up to `lock_wait`, then fails. ``"retry"``: the task is retried after `lock_countdown`, up to its
    #: ``max_retries``.
    when_held: WhenHeld = "skip"
    lock_wait: Seconds = 300.0
    lock_countdown: Seconds = 10.0
    #: The ttl of the lease: how long it outlives a worker that died; ``None`` for 30 s.
    lock_ttl: Seconds | None = None
    #: Whether the lease is renewed while the task runs. Otherwise it ends after `lock_ttl`.
    lock_renew: bool = True
    #: What happens when the lease is lost while the task runs. ``"cancel"``: the task fails with ``LockLost`` at its end.
    #: ``"continue"``: a warning is logged.
    lock_on_lost: OnLost = "cancel"
    #: What happens when the store cannot be reached. ``"closed"``: the task fails (with ``when_held="retry"`` it is retried).
    #: ``"open"``: it runs without protection, with a warning and an entry in the journal.
    lock_on_unavailable: OnUnavailable = "closed"

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Checks the options when the task is registered."""
        super().on_bound(app)
        cls._check("when_held", "skip", "wait", "retry")
        cls._check("lock_on_lost", "cancel", "continue")
        cls._check("lock_on_unavailable", "closed", "open")
        for time in ("lock_wait", "lock_countdown"):
            optional_seconds(f"{cls.name}: {time}", getattr(cls, time))
        optional_lease(f"{cls.name}: lock_ttl", cls.lock_ttl)
        flag(f"{cls.name}: lock_renew", cls.lock_renew)
        text(f"{cls.name}: lock_key", cls.lock_key)
        parameters = inspect.signature(cls.run).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        for field in _fields(cls.lock_key):
            if not takes_any and field not in parameters and field not in ("task_id", "task_name"):
                raise InvalidArgument(
                    f"{cls.name}: lock_key {cls.lock_key!r}: {field!r} is not an argument of the task; the fields are "
                    f"{', '.join([*parameters, 'task_id', 'task_name'])}"
                )

    @classmethod
    def _check(cls, option: str, *known: str | None) -> None:
        if getattr(cls, option) not in known:
            named = " or ".join(repr(value) for value in known)
            raise InvalidArgument(f"{cls.name}: {option}: {getattr(cls, option)!r} is not {named}")

    @property
    def guard(self) -> Guard | None:
        """The guard of the task that runs here, with ``fence`` and ``raise_if_lost()``."""
        return _held.innermost()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        task_id = self.request.id or uuid()
        with ExitStack() as lock:
            try:
                added = lock.enter_context(self._hold(task_id, args, kwargs))
            except LockNotAcquired as held:
                return self._lock_is_held(task_id, held)
            except StoreUnavailable as gone:
                if self.when_held == "retry":
                    raise self.retry(exc=gone, countdown=seconds("lock_countdown", self.lock_countdown)) from gone
                raise
            return self.run(*args, **{**kwargs, **added})

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        **options: Any,
    ) -> Any:
        """Celery's ``retry``. It releases the lock first, because the next try may start before this one has ended."""
        if throw and self.when_held != "wait" and self.guard is not None:
            self._release_early(self.guard)
        return super().retry(args, kwargs, exc, throw, **options)

    def lock_name(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The name of a run's lock: the key with its fields filled in."""
        known: dict[str, Any] = {"task_id": task_id, "task_name": self.name}
        known.update(_arguments(self.run, args, kwargs))
        return "".join(
            text + (_value(self, field, known) if field is not None else "")
            for text, field, _, _ in Formatter().parse(self.lock_key)
        )

    def release_after_death(self, pid: int, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Releases the locks that a pool process of this worker held for a task when it ended. A lock that has another holder by
        now is not changed."""
        dead = f"{self._label(task_id)}@{this_host()} (pid {pid})"
        client = self._client()
        for name in self._lock_names(task_id, args, kwargs):
            holder = client.holder(name)
            if holder is not None and holder.owner == dead:
                try:
                    client.evict(name, holder, force=True, reason="worker_lost")
                except NotEvicted:
                    continue
                log.warning("%s is free: the process that held it for %s has ended", name, self._label(task_id))

    @contextmanager
    def _hold(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Holds the lock. Yields the arguments to add to those of the task."""
        name = self.lock_name(task_id, args, kwargs)
        client = self._client()
        again = _held.find(client, (name,))
        if again is not None:
            # A task that holds the lock called this task as a function.
            with _held.entered_again(again):
                yield {}
            return
        lock = client.lock(
            name,
            ttl=self.lock_ttl,
            wait=self.lock_wait if self.when_held == "wait" else 0,
            renew=self.lock_renew,
            owner=self._label(task_id),
            on_lost=self.lock_on_lost,
            on_unavailable=self.lock_on_unavailable,
        )
        with lock as guard, _held.entered(client, guard, guard):
            yield {}

    def _lock_names(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        """The locks that a run may hold."""
        return [self.lock_name(task_id, args, kwargs)]

    def _client(self) -> Client:
        return _client_of(_store(self.app))

    def _release_early(self, guard: Guard) -> None:
        guard.release()

    def _label(self, task_id: str) -> str:
        """The name that people see for the holder."""
        return f"{self.name}[{task_id}]".encode()[-256:].decode(errors="ignore")

    def _lock_is_held(self, task_id: str, held: LockNotAcquired) -> Any:
        if self.when_held == "retry":
            raise self.retry(exc=held, countdown=seconds("lock_countdown", self.lock_countdown))
        if self.when_held == "wait":
            raise held
        label, holder = self._label(task_id), held.holder.owner if held.holder is not None else None
        if holder is not None and holder.startswith(f"{label}@"):
            # A second delivery of the same message. The result comes from the run that holds the lock.
            log.warning("%s is running already, by %s: this delivery is ignored", label, holder)
            raise Ignore(f"{label} is running already, by {holder}")
        log.info("%s is skipped: %s is held by %s", label, held.name, holder)
        return {"status": "skipped", "reason": "already_running", "lock": held.name, "holder": holder}


class GpuTask(LockedTask):
    """A base for tasks that run on a GPU: ``@app.task(base=GpuTask, max_wait_time=1800)``.

    The task's argument ``gpu_id`` is the number of the GPU (0 without it); the lock is ``gpu_lock:<id>``. A task waits while the
    lock is held. The lease and the default waiting time are those of :func:`leasehold.gpu.configure`.
    """

    when_held: WhenHeld = "wait"
    #: How many seconds to wait before the task fails with ``LockNotAcquired``; ``None`` for the configured time (300 s).
    max_wait_time: Seconds | None = None
    #: ``"any"`` for any free GPU. The task gets its number as the parameter ``gpu_id``, if it has one, and by
    #: :func:`leasehold.gpu.current`.
    gpu: Literal["any"] | None = None
    #: With ``gpu="any"``: the number of GPUs; ``None`` for the configured number, else the GPUs in ``CUDA_VISIBLE_DEVICES``.
    gpus: int | None = None

    # The name comes from the GPU's number, not from a template.
    lock_key = ""

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Checks the options when the task is registered, and refuses those that a GPU task does not use."""
        super().on_bound(app)
        cls._check("gpu", None, "any")
        optional_seconds(f"{cls.name}: max_wait_time", cls.max_wait_time)
        for option in ("lock_key", "lock_wait", "lock_ttl", "lock_renew", "lock_on_lost", "lock_on_unavailable"):
            if getattr(cls, option) not in (getattr(GpuTask, option), getattr(LockedTask, option)):
                raise InvalidArgument(
                    f"{cls.name}: {option} is not for tasks on a GPU: they wait for max_wait_time, and "
                    "leasehold.gpu.configure() sets their leases"
                )

    @cached_property
    def gpu_lock_manager(self) -> Any:
        """Finds the GPU lock of a task by the task's id. It can be replaced."""
        return SmartGpuLockManager(self._client)

    def clean_up(self) -> None:
        """Runs before the GPU is released, even after an exception: it frees PyTorch's cached memory. If it fails, a warning is
        logged."""
        gpu.empty_torch_cache()

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Releases the GPU lock that the task still holds under its id, if there is one: a lock that it acquired with a
        :class:`~leasehold.gpu.SmartGpuLockManager`, or that an older client wrote."""
        super().on_failure(exc, task_id, args, kwargs, einfo)
        try:
            manager = self.gpu_lock_manager
            for lock_key in self._lock_names(task_id, args, kwargs):
                # Usually there is none: the lock that the task ran under is released already.
                if not isinstance(manager, SmartGpuLockManager) or manager.owns_here(task_id, lock_key):
                    manager.release_lock(task_id, lock_key, "task_failure")
        except Exception as problem:
            # It must not hide the error of the task.
            log.error("the GPU lock of %s was not released: %s", self._label(task_id), problem, exc_info=True)

    def lock_name(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The lock of a run's GPU."""
        return gpu.settings().lock_name(self._gpu_id(args, kwargs))

    @contextmanager
    def _hold(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        client = self._client()
        held = gpu.hold(
            None if self.gpu == "any" else self._gpu_id(args, kwargs),
            gpus=self.gpus,
            max_wait_time=self._max_wait(),
            cleanup=self.clean_up,
            task_name=self._label(task_id),
        )
        with held as mine, _held.entered(client, mine.guard, mine.guard):
            takes_id = self.gpu == "any" and "gpu_id" in inspect.signature(self.run).parameters
            yield {"gpu_id": mine.id} if takes_id else {}

    def _max_wait(self) -> float | None:
        if self.when_held != "wait":
            return 0.0
        return None if self.max_wait_time is None else seconds("max_wait_time", self.max_wait_time)

    def _lock_names(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        if self.gpu != "any":
            return [self.lock_name(task_id, args, kwargs)]
        now = gpu.settings()
        return [now.lock_name(gpu_id) for gpu_id in now.members(self.gpus)]

    def _gpu_id(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        gpu_id = _arguments(self.run, args, kwargs).get("gpu_id")
        return 0 if gpu_id is None else gpu_number(gpu_id)

    def _client(self) -> Client:
        return client_of(lambda: _store(self.app))

    def _release_early(self, guard: Guard) -> None:
        with gpu.only_warn(guard.name):
            self.clean_up()
        guard.release()


@overload
def locked_task(key: Callable[..., Any], /) -> Any: ...


@overload
def locked_task(
    key: str = ...,
    *,
    app: Any = None,
    when_held: WhenHeld = "skip",
    wait: Seconds = ...,
    countdown: Seconds = ...,
    ttl: Seconds | None = None,
    renew: bool = True,
    on_lost: OnLost = "cancel",
    on_unavailable: OnUnavailable = "closed",
    **options: Any,
) -> Callable[[Callable[..., Any]], Any]: ...


def locked_task(
    key: str | Callable[..., Any] = LockedTask.lock_key,
    *,
    app: Any = None,
    when_held: WhenHeld = "skip",
    wait: Seconds = LockedTask.lock_wait,
    countdown: Seconds = LockedTask.lock_countdown,
    ttl: Seconds | None = None,
    renew: bool = True,
    on_lost: OnLost = "cancel",
    on_unavailable: OnUnavailable = "closed",
    **options: Any,
) -> Any:
    """Makes a function a Celery task that runs under a lock; otherwise like ``@app.task``.

    :param key: the name of the lock, with fields in braces: the task's arguments by name, ``{task_id}``, ``{task_name}``.
        Expressions are not allowed.
    :param app: the app. Without it, the task is a shared task.
    :param when_held: ``"skip"``, ``"wait"`` or ``"retry"`` when the lock is held: see :class:`LockedTask`.
    :param wait: with ``"wait"``: how many seconds to wait before the task fails with ``LockNotAcquired``.
    :param countdown: with ``"retry"``: the seconds until the next try, up to ``max_retries`` times.
    :param ttl: the ttl of the lease: how long it outlives a worker that died. Default: 30 s.
    :param renew: renew the lease while the task runs; otherwise it ends after `ttl`.
    :param on_lost: ``"cancel"`` or ``"continue"`` when the lease is lost: see :class:`LockedTask`.
    :param on_unavailable: ``"closed"`` or ``"open"`` when the store cannot be reached: see :class:`LockedTask`.
    :param options: Celery's options: ``bind``, ``name``, ``acks_late``, ``max_retries``, ``time_limit``…

    >>> from celery import Celery
    >>> app = Celery("shop", broker="memory://")
    >>> app.conf.leasehold_store = "memory:"
    >>> @locked_task(key="report:{year}", app=app, when_held="wait", wait=60, bind=True)
    ... def report(self, year):
    ...     return self.guard.name
    >>> report.apply(args=[2026]).get()
    'report:2026'
    """
    if callable(key):
        return locked_task()(key)
    options.setdefault("base", LockedTask)
    make = shared_task if app is None else app.task
    return make(
        lock_key=key,
        when_held=when_held,
        lock_wait=wait,
        lock_countdown=countdown,
        lock_ttl=ttl,
        lock_renew=renew,
        lock_on_lost=on_lost,
        lock_on_unavailable=on_unavailable,
        **options,
    )


#: The guards of the tasks that run here. A task may call another one as a function.
_held: EnteredLocks[Guard] = EnteredLocks("leasehold_task_guards")

_clients: dict[str, Client] = {}


def _client_of(store: str) -> Client:
    client = _clients.get(store)
    return client if client is not None else _clients.setdefault(store, connect(store, lazy=True))


def _store(app: Any) -> str:
    """The store of an app's task locks."""
    set_by_app = app.conf.get("leasehold_store")
    if set_by_app:
        return str(set_by_app)
    config = load()
    if config.value_set("store") is not None:
        return config.store
    broker = app.conf.broker_write_url or app.conf.broker_url
    if isinstance(broker, str) and broker.startswith("redis://") and ";" not in broker:
        return broker.partition("?")[0]
    # The default SQLite file would not exclude workers on other machines.
    raise InvalidArgument(
        'it is not known which store has the locks: set app.conf.leasehold_store = "redis://…", LEASEHOLD_STORE, or `store` in the configuration'
    )


def _fields(template: str) -> list[str]:
    fields = []
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise InvalidArgument(f"lock_key {template!r}: {error}") from None
    for _, field, spec, conversion in parts:
        if field is None:
            continue
        if not field.isidentifier() or spec or conversion:
            raise InvalidArgument(f"lock_key {template!r}: a field must be the name of an argument")
        fields.append(field)
    return fields


def _arguments(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a run by name."""
    signature = inspect.signature(run)
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:
        # The call of the function raises the error.
        return dict(kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    return named


def _value(task: Any, field: str, known: dict[str, Any]) -> str:
    if field not in known:
        raise InvalidArgument(
            f"{task.name}: lock_key {task.lock_key!r}: this call has no {field!r}; the fields are {', '.join(known)}"
        )
    value = known[field]
    if value is None or value == "" or isinstance(value, bytes | dict | list | tuple | set):
        raise InvalidArgument(f"{task.name}: lock_key {task.lock_key!r}: {field} is {value!r}, which cannot be part of a name")
    return str(value)


@signals.worker_process_shutdown.connect(weak=False)  # type: ignore[untyped-decorator]
def _pool_process_ends(**_: Any) -> None:
    # Pool processes end without running `atexit`.
    release_everything()
