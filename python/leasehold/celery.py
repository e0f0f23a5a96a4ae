"""Celery tasks that run under a lock.

    >>> from celery import Celery
    >>> from leasehold.celery import GpuTask, locked_task
    >>> app = Celery("shop", broker="memory://")
    >>> app.conf.leasehold_store = "memory:"  # redis://…; left out: LEASEHOLD_STORE, or a Redis broker itself

    One run per order at a time; whoever comes meanwhile is skipped, and its result says who runs:

    >>> @locked_task(key="task_lock:{order_id}", app=app)
    ... def pay(order_id):
    ...     return f"order {order_id} is paid"
    >>> pay.apply(args=[42]).get()
    'order 42 is paid'

    One task at a time on a GPU; whoever comes meanwhile waits:

    >>> @app.task(base=GpuTask, max_wait_time=1800)
    ... def transcribe(file, gpu_id=0):
    ...     return f"{file} on GPU {gpu_id}"
    >>> transcribe.apply(args=["talk.wav"], kwargs={"gpu_id": 1}).get()
    'talk.wav on GPU 1'

The lock is given back when the task returns, fails, retries, is revoked or meets a time limit, and when the worker
shuts down. A pool process that was killed is seen by its worker, which gives back what it held; when the whole
machine is gone, the lease ends by itself. A task that ends late never frees its successor's lock.
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
from ._inside import Inside
from ._lock import Guard, OnLost, OnUnavailable, _give_everything_back
from ._times import Seconds, flag, optional_lease, optional_seconds, seconds, text

__all__ = ["GpuTask", "LockedTask", "locked_task"]

WhenHeld: TypeAlias = Literal["skip", "wait", "retry"]

log = logging.getLogger("leasehold")


class LockedTask(Task):  # type: ignore[misc]
    """A base for tasks that run under a lock: ``@app.task(base=LockedTask, lock_key="task_lock:{order_id}")``.

    Its attributes are options of ``@app.task``, and :func:`locked_task` names them shorter.
    """

    # The worker's side: who sees to it when a pool process is gone.
    Request = "leasehold._celery_request:LockedRequest"

    #: The lock, with fields in braces: the task's arguments by name, ``{task_id}``, ``{task_name}``.
    lock_key: str = "task_lock:{task_id}"
    #: What to do when somebody else holds the lock. ``"skip"``: the task does not run, and its result says who
    #: does. ``"wait"``: at most `lock_wait`, then the task fails. ``"retry"``: again after `lock_countdown`, as
    #: often as the task's ``max_retries`` says.
    when_held: WhenHeld = "skip"
    lock_wait: Seconds = 300.0
    lock_countdown: Seconds = 10.0
    #: How long the lock outlives a worker that died; ``None``: 30 s.
    lock_ttl: Seconds | None = None
    #: Renew the lease while the task runs. Otherwise it is over after `lock_ttl`, done or not.
    lock_renew: bool = True
    #: When the lease is lost while the task runs. ``"cancel"``: the task fails with ``LockLost`` when it ends.
    #: ``"continue"``: a warning.
    lock_on_lost: OnLost = "cancel"
    #: When the store cannot be reached. ``"closed"``: the task fails (with ``when_held="retry"`` it retries).
    #: ``"open"``: it runs without protection, with a warning and an entry in the journal.
    lock_on_unavailable: OnUnavailable = "closed"

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Refuses at once what could only go wrong later."""
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
                    f"{cls.name}: lock_key {cls.lock_key!r}: {field!r} is no argument of the task; there are "
                    f"{', '.join([*parameters, 'task_id', 'task_name'])}"
                )

    @classmethod
    def _check(cls, option: str, *known: str | None) -> None:
        if getattr(cls, option) not in known:
            named = " or ".join(repr(value) for value in known)
            raise InvalidArgument(f"{cls.name}: {option}: {getattr(cls, option)!r} is not {named}")

    @property
    def guard(self) -> Guard | None:
        """What holds the lock of the task that runs here: its fence, ``raise_if_lost()``."""
        return _held.innermost()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        task_id = self.request.id or uuid()
        with ExitStack() as lock:
            try:
                told = lock.enter_context(self._hold(task_id, args, kwargs))
            except LockNotAcquired as held:
                return self._not_now(task_id, held)
            except StoreUnavailable as gone:
                if self.when_held == "retry":
                    raise self.retry(exc=gone, countdown=seconds("lock_countdown", self.lock_countdown)) from gone
                raise
            return self.run(*args, **{**kwargs, **told})

    def retry(
        self,
        args: Any = None,
        kwargs: Any = None,
        exc: BaseException | None = None,
        throw: bool = True,
        **options: Any,
    ) -> Any:
        """As Celery's. The lock is given back first: the next try may begin before this one has ended."""
        if throw and self.when_held != "wait" and self.guard is not None:
            self._give_back_early(self.guard)
        return super().retry(args, kwargs, exc, throw, **options)

    def lock_name(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The lock of one run: the key with its fields filled in."""
        known: dict[str, Any] = {"task_id": task_id, "task_name": self.name}
        known.update(_arguments(self.run, args, kwargs))
        return "".join(
            text + (_value(self, field, known) if field is not None else "")
            for text, field, _, _ in Formatter().parse(self.lock_key)
        )

    def release_after_death(self, pid: int, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Gives back what a pool process of this worker, which is gone, still held for a task. Whoever got the
        lock meanwhile keeps it."""
        dead = f"{self._label(task_id)}@{this_host()} (pid {pid})"
        client = self._client()
        for name in self._lock_names(task_id, args, kwargs):
            holder = client.holder(name)
            if holder is not None and holder.owner == dead:
                try:
                    client.evict(name, holder, force=True, reason="worker_lost")
                except NotEvicted:
                    continue
                log.warning("%s is free: the process that held it for %s is gone", name, self._label(task_id))

    @contextmanager
    def _hold(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Holds the lock, and says what the task is to be told."""
        name = self.lock_name(task_id, args, kwargs)
        client = self._client()
        again = _held.find(client, (name,))
        if again is not None:
            # Called by a task that runs under it: nobody else is kept out by waiting for oneself.
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
        """Whatever a run may hold."""
        return [self.lock_name(task_id, args, kwargs)]

    def _client(self) -> Client:
        return _client_of(_store(self.app))

    def _give_back_early(self, guard: Guard) -> None:
        guard.release()

    def _label(self, task_id: str) -> str:
        """What people read who ask for the holder."""
        return f"{self.name}[{task_id}]".encode()[-256:].decode(errors="ignore")

    def _not_now(self, task_id: str, held: LockNotAcquired) -> Any:
        if self.when_held == "retry":
            raise self.retry(exc=held, countdown=seconds("lock_countdown", self.lock_countdown))
        if self.when_held == "wait":
            raise held
        label, holder = self._label(task_id), held.holder.owner if held.holder is not None else None
        if holder is not None and holder.startswith(f"{label}@"):
            # The same message once more: its result is that of the run that goes on.
            log.warning("%s is running already, by %s: this delivery is refused", label, holder)
            raise Ignore(f"{label} is running already, by {holder}")
        log.info("%s is skipped: %s is held by %s", label, held.name, holder)
        return {"status": "skipped", "reason": "already_running", "lock": held.name, "holder": holder}


class GpuTask(LockedTask):
    """A base for tasks that run on a GPU: ``@app.task(base=GpuTask, max_wait_time=1800)``.

    The GPU is the one that the argument ``gpu_id`` names, else 0; its lock is ``gpu_lock:<id>``. Whoever comes
    while it is taken waits. The lease and the default waiting time are those of :func:`leasehold.gpu.configure`.
    """

    when_held: WhenHeld = "wait"
    #: At most so many seconds, then the task fails with ``LockNotAcquired``; ``None``: as configured, 300 s.
    max_wait_time: Seconds | None = None
    #: ``"any"``: any one that is free. The task learns which by its parameter ``gpu_id``, if it has one, or by
    #: :func:`leasehold.gpu.current`.
    gpu: Literal["any"] | None = None
    #: With ``gpu="any"``: there are so many; otherwise as configured, or as ``CUDA_VISIBLE_DEVICES`` says.
    gpus: int | None = None

    # Not made of a template.
    lock_key = ""

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Refuses at once what could only go wrong later, or what would change nothing."""
        super().on_bound(app)
        cls._check("gpu", None, "any")
        optional_seconds(f"{cls.name}: max_wait_time", cls.max_wait_time)
        for option in ("lock_key", "lock_wait", "lock_ttl", "lock_renew", "lock_on_lost", "lock_on_unavailable"):
            if getattr(cls, option) not in (getattr(GpuTask, option), getattr(LockedTask, option)):
                raise InvalidArgument(
                    f"{cls.name}: {option} is not for tasks on a GPU: they wait for max_wait_time, and their leases are "
                    "as leasehold.gpu.configure() says"
                )

    @cached_property
    def gpu_lock_manager(self) -> Any:
        """Finds the GPU lock of a task by its id. Another one can be set."""
        return SmartGpuLockManager(self._client)

    def clean_up(self) -> None:
        """Runs before the GPU is given back, whatever happened: it gives PyTorch's cached memory back. When it
        fails, that is a warning."""
        gpu.empty_torch_cache()

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Frees the GPU lock that the task still holds under its id, if it does: one that it acquired by itself
        with a :class:`~leasehold.gpu.SmartGpuLockManager`, or that an older client wrote."""
        super().on_failure(exc, task_id, args, kwargs, einfo)
        try:
            manager = self.gpu_lock_manager
            for lock_key in self._lock_names(task_id, args, kwargs):
                # Mostly it holds nothing: what it ran under has been given back.
                if not isinstance(manager, SmartGpuLockManager) or manager.owns_here(task_id, lock_key):
                    manager.release_lock(task_id, lock_key, "task_failure")
        except Exception as problem:
            # It must not hide what the task failed of.
            log.error("the GPU lock of %s was not released: %s", self._label(task_id), problem, exc_info=True)

    def lock_name(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """The lock of the GPU that a run names."""
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
            wants_it = self.gpu == "any" and "gpu_id" in inspect.signature(self.run).parameters
            yield {"gpu_id": mine.id} if wants_it else {}

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

    def _give_back_early(self, guard: Guard) -> None:
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
    """Makes a function a Celery task that runs under a lock, as ``@app.task`` makes it a task.

    :param key: the lock, with fields in braces: the task's arguments by name, ``{task_id}``, ``{task_name}``.
        No expressions.
    :param app: the app; left out, the task is a shared one.
    :param when_held: ``"skip"``, ``"wait"`` or ``"retry"`` when somebody else holds the lock.
    :param wait: with ``"wait"``: at most so many seconds, then the task fails with ``LockNotAcquired``.
    :param countdown: with ``"retry"``: again after so many seconds, at most ``max_retries`` times.
    :param ttl: how long the lock outlives a worker that died: 30 s unless said.
    :param renew: renew the lease while the task runs; otherwise it is over after `ttl`.
    :param on_lost: ``"cancel"`` or ``"continue"``: see :class:`LockedTask`.
    :param on_unavailable: ``"closed"`` or ``"open"``: see :class:`LockedTask`.
    :param options: Celery's own: ``bind``, ``name``, ``acks_late``, ``max_retries``, ``time_limit``…

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


#: What the tasks that run here hold: one may call another as a function.
_held: Inside[Guard] = Inside("leasehold_task_guards")

_clients: dict[str, Client] = {}


def _client_of(store: str) -> Client:
    client = _clients.get(store)
    return client if client is not None else _clients.setdefault(store, connect(store, lazy=True))


def _store(app: Any) -> str:
    """Where the locks of an app's tasks are kept."""
    told = app.conf.get("leasehold_store")
    if told:
        return str(told)
    config = load()
    if config.said("store") is not None:
        return config.store
    broker = app.conf.broker_write_url or app.conf.broker_url
    if isinstance(broker, str) and broker.startswith("redis://") and ";" not in broker:
        return broker.partition("?")[0]
    # Not the file of this machine: workers on others would take no notice.
    raise InvalidArgument(
        'it is not known where the locks are kept: set app.conf.leasehold_store = "redis://…", LEASEHOLD_STORE, or `store` in the configuration'
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
            raise InvalidArgument(f"lock_key {template!r}: a field is the name of an argument, nothing more")
        fields.append(field)
    return fields


def _arguments(run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A run's arguments by name, as far as they fit."""
    signature = inspect.signature(run)
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:
        # The call itself will say so.
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
            f"{task.name}: lock_key {task.lock_key!r}: this call has no {field!r}; there are {', '.join(known)}"
        )
    value = known[field]
    if value is None or value == "" or isinstance(value, bytes | dict | list | tuple | set):
        raise InvalidArgument(f"{task.name}: lock_key {task.lock_key!r}: {field} is {value!r}, which names nothing")
    return str(value)


@signals.worker_process_shutdown.connect(weak=False)  # type: ignore[untyped-decorator]
def _pool_process_ends(**_: Any) -> None:
    # Pool processes end without Python's own way out.
    _give_everything_back()
