import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { type Lock, type Seen, Problem, request, lockPath } from "./api";
import { Dot } from "./dot";
import { changes, lanes, locks, overview, silentSince } from "./live";
import { Connected, Lease, evict } from "./locks";
import { close } from "./state";
import { shown } from "./text";
import { clock, now, span, tick, took } from "./time";
import { ENDS } from "./timeline/timeline";

const TENURES = 20;

/** The details of one lock: the content of `leasehold why`, and the last tenures. */
export function Drawer({ name }: { name: string }) {
  const observed = useSignal<Seen | null>(locks.get(name) ?? null);
  const problem = useSignal("");
  const title = useRef<HTMLHeadingElement>(null);
  useEffect(() => {
    title.current?.focus();
    let live = true;
    const refresh = async () => {
      while (live) {
        try {
          const lock = await request<Lock>(lockPath(name));
          observed.value = { ...lock, at_ms: now() };
          problem.value = "";
        } catch (error) {
          if (error instanceof Problem) problem.value = error.message;
        }
        await new Promise((done) => setTimeout(done, 1_000));
      }
    };
    void refresh();
    return () => {
      live = false;
    };
  }, [name]);
  tick.value;
  changes.value;
  const lock = observed.value;
  const at = overview.value?.store_down_since_ms ?? silentSince.value ?? now();
  const viewer = overview.value?.role === "viewer";
  return (
    <div class="drawer" role="dialog" aria-labelledby="drawer-title">
      <div class="top">
        <div>
          <h2 id="drawer-title" class="mono" tabIndex={-1} ref={title}>{shown(name)}</h2>
          <p class="state">
            {lock === null ? "…" : lock.held ? (lock.revoked ? "held, revoked: its holder has been told to stop" : "held") : lock.waiters.length > 0 ? "being handed off" : "free"}
          </p>
        </div>
        <button type="button" class="icon round" onClick={close} aria-label="Close" title="Close (Esc)">✕</button>
      </div>
      {problem.value && <p class="problem">{problem.value}</p>}
      {lock?.held && (
        <section aria-label="Holder">
          <p class="holder">
            <Dot owner={lock.owner ?? ""} /> <strong>{shown(lock.owner ?? "")}</strong>
            {lock.foreign && <span class="tag foreign">foreign</span>}
          </p>
          <dl class="facts">
            <dt>held for</dt>
            <dd>{lock.since_ms === null ? "unknown: another kind of client" : `${span(at - lock.since_ms)}, since ${clock(lock.since_ms)}`}</dd>
            <dt>sign of life</dt>
            <dd>{lock.last_seen_ms === null ? "–" : `${span(at - lock.last_seen_ms)} ago`}</dd>
            <dt>connected</dt>
            <dd><Connected lock={lock} /></dd>
            <dt>lease</dt>
            <dd><Lease lock={lock} at={at} />{lock.ttl_ms !== null && <span class="faint"> of {span(lock.ttl_ms)}</span>}</dd>
            <dt>fence</dt>
            <dd class="mono">{lock.fence ?? lanes.get(name)?.tenures.get(lock.holder_id ?? "")?.fence ?? "–"}</dd>
            <dt>holder id</dt>
            <dd class="mono">{lock.holder_id}</dd>
          </dl>
          <div class="action">
            <button type="button" class="button danger" disabled={viewer} aria-describedby={viewer ? "viewer-why" : undefined} onClick={() => evict(lock)}>
              Evict…
            </button>
            {viewer && <p id="viewer-why" class="faint">This key can only read: evicting needs an operator key.</p>}
          </div>
        </section>
      )}
      <section aria-labelledby="queue-title">
        <h3 id="queue-title">Waiting {lock && lock.waiters.length > 0 && <span class="count">{lock.waiters.length}</span>}</h3>
        {lock && lock.waiters.length > 0 ? (
          <ol class="waiters">
            {lock.waiters.slice(0, 50).map((waiter) => (
              <li key={waiter.ticket}>
                <Dot owner={waiter.owner} /> <span class="text">{shown(waiter.owner)}</span>
                <span class="number">{span(waiter.waiting_ms + Math.max(0, at - lock.at_ms))}</span>
              </li>
            ))}
            {lock.waiters.length > 50 && <li class="faint">and {lock.waiters.length - 50} more</li>}
          </ol>
        ) : (
          <p class="faint">Nobody.</p>
        )}
      </section>
      <LastTenures name={name} />
      <p class="faint foot">
        In a terminal: <code>leasehold why {quoted(name)}</code>
      </p>
    </div>
  );
}

/** Quotes a name for a shell; invisible characters are escaped in bash's syntax. */
function quoted(name: string): string {
  if (/^[\w.:@%+=,/-]+$/.test(name)) return name;
  const plain = `'${name.replaceAll("'", "'\\''")}'`;
  if (shown(name) === name) return plain;
  const escaped = name.replace(/[\\']/g, "\\$&");
  return `$'${shown(escaped).replace(/\\u\{([0-9a-f]+)\}/g, (_, hex: string) => `\\U${hex.padStart(8, "0")}`)}'`;
}

function LastTenures({ name }: { name: string }) {
  const lane = lanes.get(name);
  const tenures = lane ? [...lane.tenures.values()].sort((a, b) => b.since_ms - a.since_ms).slice(0, TENURES) : [];
  return (
    <section aria-labelledby="before-title">
      <h3 id="before-title">Last tenures</h3>
      {tenures.length === 0 && <p class="faint">None in the last hour.</p>}
      {tenures.length > 0 && (
        <table class="plain tenures">
          <thead>
            <tr>
              <th scope="col">Holder</th>
              <th scope="col">Since</th>
              <th scope="col">Held</th>
              <th scope="col">Waited</th>
              <th scope="col">End</th>
            </tr>
          </thead>
          <tbody>
            {tenures.map((t) => (
              <tr key={t.holder_id}>
                <td title={shown(t.owner)}><Dot owner={t.owner} /> <span class="text">{shown(t.owner)}</span></td>
                <td class="number">{clock(t.since_ms)}</td>
                <td class="number">{t.ended_ms === null ? span(now() - t.since_ms) : took(t.ended_ms - t.since_ms)}</td>
                <td class="number">{t.waited_ms === null ? "–" : took(t.waited_ms)}</td>
                <td class={`end ${t.end ?? ""}`} title={t.end ? ENDS[t.end] : ""}>{t.end ?? "held"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}
