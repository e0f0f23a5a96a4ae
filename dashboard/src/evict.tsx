import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { type Evicted, type Lock, Problem, type Seen, request, lockPath } from "./api";
import { locks, pollNow } from "./live";
import { short } from "./owners";
import { type Target, evicting, notify } from "./state";
import { shown } from "./text";
import { now, span, tick } from "./time";

/** The dialog that evicts a holder. It evicts only the holder that it was opened for. */
export function Evict({ target }: { target: Target }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const mode = useSignal<"revoke" | "force">("revoke");
  const reason = useSignal("");
  const typed = useSignal("");
  const busy = useSignal(false);
  const problem = useSignal("");
  const lock = useSignal<Seen | null>(locks.get(target.name) ?? null);

  useEffect(() => {
    const element = dialog.current;
    element?.showModal();
    let live = true;
    // The dialog must describe the current state when the user confirms.
    const refresh = async () => {
      while (live) {
        try {
          const found = await request<Lock>(lockPath(target.name));
          lock.value = { ...found, at_ms: now() };
        } catch {
          // The dialog keeps the last known state; the server compares the holder id in any case.
        }
        await new Promise((done) => setTimeout(done, 400));
      }
    };
    void refresh();
    return () => {
      live = false;
      element?.close();
    };
  }, []);

  tick.value;
  const seen = lock.value;
  const changed = seen !== null && seen.holder_id !== target.holderId;
  const foreign = seen?.foreign ?? false;
  if (foreign && mode.value === "revoke") mode.value = "force";
  const force = mode.value === "force";
  const ready = !changed && !busy.value && reason.value.trim() !== "" && (!force || [target.name, shown(target.name)].includes(typed.value));

  const close = () => (evicting.value = null);
  const submit = async (event: Event) => {
    event.preventDefault();
    if (!ready) return;
    busy.value = true;
    problem.value = "";
    try {
      const done = await request<Evicted>(`${lockPath(target.name)}/evict`, { holder_id: target.holderId, mode: mode.value, reason: reason.value.trim() });
      if (done.outcome === "free") notify(`${shown(target.name)} was already free; nothing was done.`);
      else if (done.outcome === "forced") notify(`${shown(target.name)} was taken from ${shown(target.owner)}.`);
      else notify(`${shown(target.owner)} has been told to stop.`);
      pollNow();
      close();
    } catch (error) {
      problem.value = error instanceof Problem ? error.message : "No response: the outcome is unknown. Check the lock.";
      busy.value = false;
    }
  };

  return (
    <dialog ref={dialog} class="evict" aria-labelledby="evict-title" onClose={close} onCancel={close}>
      <form onSubmit={submit}>
        <h2 id="evict-title">Take <span class="mono">{shown(target.name)}</span> away from {short(target.owner)}</h2>
        <p class="faint">{shown(target.owner)} · id <span class="mono">{target.holderId}</span></p>
        {changed && (
          <div class="changed" role="alert">
            <strong>Changed hands.</strong>{" "}
            {seen?.held ? `${shown(seen.owner ?? "")} (id ${seen.holder_id}) holds it now; ` : "It is free now; "}
            nothing was done. {seen?.held ? "Close this dialog and check the new holder first." : ""}
          </div>
        )}
        <fieldset disabled={changed || busy.value}>
          <legend class="unseen">Mode</legend>
          <label class={mode.value === "revoke" ? "choice on" : "choice"}>
            <input type="radio" name="mode" value="revoke" checked={!force} disabled={foreign} onChange={() => (mode.value = "revoke")} />
            <span><strong>Revoke</strong> {revokes(target, seen)}</span>
          </label>
          <label class={force ? "choice on danger" : "choice"}>
            <input type="radio" name="mode" value="force" checked={force} onChange={() => (mode.value = "force")} />
            <span><strong>Force</strong> {forces(target, seen)}</span>
          </label>
          <label class="field" for="evict-reason">Reason <span class="faint">for the audit and the events</span></label>
          <input id="evict-reason" type="text" required maxLength={400} autocomplete="off" value={reason.value} onInput={(event) => (reason.value = event.currentTarget.value)} />
          {force && (
            <>
              <label class="field" for="evict-name">Type the lock's name <span class="mono">{shown(target.name)}</span></label>
              <input id="evict-name" type="text" class="mono" autocomplete="off" spellcheck={false} value={typed.value} onInput={(event) => (typed.value = event.currentTarget.value)} />
            </>
          )}
        </fieldset>
        {problem.value && <p class="problem" role="alert">{problem.value}</p>}
        <div class="buttons">
          <button type="button" class="button" onClick={close}>{changed ? "Close" : "Cancel"}</button>
          <button type="submit" class="button danger" disabled={!ready}>
            {force ? `Force ${short(target.owner)} out` : `Revoke ${short(target.owner)}`}
          </button>
        </div>
      </form>
    </dialog>
  );
}

function next(lock: Seen | null): string | null {
  const first = lock?.waiters[0];
  return first ? short(first.owner) : null;
}

function revokes(target: Target, lock: Seen | null): string {
  if (lock?.foreign) return "is not possible: another kind of client cannot be notified.";
  const left = lock?.ttl_left_ms === null || !lock ? null : Math.max(0, lock.at_ms + lock.ttl_left_ms - now());
  const latest = left === null ? "" : `, at the latest in ${span(left)}`;
  const who = next(lock);
  const then = who ? `${who} enters when it has${latest}.` : `the lock is free when it has${latest}.`;
  return `${short(target.owner)} is told to stop; ${then}`;
}

function forces(target: Target, lock: Seen | null): string {
  const who = next(lock);
  const then = who ? `${who} enters now.` : "The lock is free now.";
  const seen = lock?.last_seen_ms ?? null;
  const life = lock?.connected === false ? "its connection is gone" : seen === null ? "last sign of life unknown" : `last sign of life ${span(now() - seen)} ago`;
  return `${then} ${short(target.owner)} may still be running (${life}): only fences protect what it writes.`;
}
