import { type Signal, useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { type AuditLine, type JournalEntry, Problem, request } from "./api";
import { overview } from "./live";
import { Locks } from "./locks";
import { type Tab, open, notify, tab } from "./state";
import { shown } from "./text";
import { clock } from "./time";

/** The tabs: locks, journal and audit. Tabs that this server does not support are hidden. */
export function Records({ empty }: { empty: boolean }) {
  const journal = useSignal<JournalEntry[] | null>(null);
  const audit = useSignal<AuditLine[] | null>(null);
  const answered = overview.value !== null;
  useEffect(() => {
    if (!answered) return;
    let live = true;
    const refresh = async () => {
      while (live) {
        if (!document.hidden) {
          await Promise.all([
            fill("/api/v1/journal", (answer: { entries: JournalEntry[] } | null) => (journal.value = answer?.entries ?? null)),
            fill("/api/v1/audit?limit=200", (answer: { lines: AuditLine[] } | null) => (audit.value = answer?.lines ?? null)),
          ]);
        }
        const pause = tab.value === "locks" ? 10_000 : 2_000;
        await new Promise((done) => setTimeout(done, pause));
      }
    };
    void refresh();
    return () => {
      live = false;
    };
  }, [answered]);
  const tabs: [Tab, string, number | null][] = [["locks", "Locks", null]];
  if (journal.value) tabs.push(["journal", "Journal", journal.value.length]);
  if (audit.value) tabs.push(["audit", "Audit", null]);
  const current = tabs.some(([name]) => name === tab.value) ? tab.value : "locks";
  const list = useRef<HTMLDivElement>(null);
  const arrows = (event: KeyboardEvent) => {
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (step === 0) return;
    const at = tabs.findIndex(([name]) => name === current);
    const to = (at + step + tabs.length) % tabs.length;
    tab.value = tabs[to]?.[0] ?? "locks";
    list.current?.querySelectorAll("button")[to]?.focus();
  };
  if (empty && tabs.length === 1) return null;
  return (
    <section class="panel records" aria-labelledby="locks-title">
      <header class="panel-head">
        <h2 id="locks-title" tabIndex={-1} class={tabs.length > 1 ? "unseen" : ""}>Locks</h2>
        {tabs.length > 1 && (
          <div class="tabs" role="tablist" aria-label="Locks and records" ref={list} onKeyDown={arrows}>
            {tabs.map(([name, title, count]) => (
              <button type="button" role="tab" key={name} id={`tab-${name}`} aria-selected={current === name} aria-controls="records" tabIndex={current === name ? 0 : -1} onClick={() => (tab.value = name)}>
                {title}
                {count !== null && count > 0 && <span class="count warn">{count}</span>}
              </button>
            ))}
          </div>
        )}
      </header>
      <div id="records" role={tabs.length > 1 ? "tabpanel" : undefined} aria-labelledby={tabs.length > 1 ? `tab-${current}` : undefined}>
        {current === "locks" && <Locks />}
        {current === "journal" && <Journal entries={journal} />}
        {current === "audit" && <Audit lines={audit.value ?? []} />}
      </div>
    </section>
  );
}

async function fill<T>(path: string, set: (answer: T | null) => void): Promise<void> {
  try {
    set(await request<T>(path));
  } catch (error) {
    if (error instanceof Problem && error.status === 404) set(null);
  }
}

function Journal({ entries }: { entries: Signal<JournalEntry[] | null> }) {
  const settling = useSignal<string | null>(null);
  const reason = useSignal("");
  const viewer = overview.value?.role === "viewer";
  const all = entries.value ?? [];
  const settle = async (entry: JournalEntry) => {
    try {
      await request(`/api/v1/journal/${encodeURIComponent(entry.id)}/settle`, { reason: reason.value.trim() });
      entries.value = all.filter((other) => other.id !== entry.id);
      notify(`Settled: ${shown(entry.name)}.`);
      settling.value = null;
      reason.value = "";
    } catch (error) {
      notify(error instanceof Problem ? error.message : "No response. Try again.", true);
    }
  };
  return (
    <div class="list">
      <p class="faint">Releases that failed on the server's machine. They are repeated when the store is back. Settle an entry that you have resolved yourself.</p>
      {viewer && <p class="faint" id="settle-why">This key can only read: settling needs an operator key.</p>}
      {all.length === 0 && <p class="quiet">The journal is empty.</p>}
      {all.length > 0 && (
        <Table
          label="Journal"
          heads={["When", "Lock", "What", "Owner", "Why", ""]}
          rows={all.map((entry) => ({
            key: entry.id,
            cells: [
              <span class="number">{clock(entry.at_ms)}</span>,
              <button type="button" class="link mono" onClick={() => open(entry.name)}>{shown(entry.name)}</button>,
              KINDS[entry.kind] ?? entry.kind,
              shown(entry.owner ?? ""),
              shown(entry.why ?? ""),
              settling.value === entry.id ? (
                <form class="inline" onSubmit={(event) => {
                  event.preventDefault();
                  if (reason.value.trim()) void settle(entry);
                }}>
                  <label class="unseen" for="settle-reason">Reason</label>
                  <input id="settle-reason" type="text" placeholder="Reason" required maxLength={400} value={reason.value} onInput={(event) => (reason.value = event.currentTarget.value)} />
                  <button type="submit" class="button small danger">Settle</button>
                  <button type="button" class="button small" onClick={() => (settling.value = null)}>Cancel</button>
                </form>
              ) : (
                <button type="button" class="button small" disabled={viewer} aria-describedby={viewer ? "settle-why" : undefined} onClick={() => (settling.value = entry.id)}>Settle…</button>
              ),
            ],
          }))}
        />
      )}
    </div>
  );
}

function Audit({ lines }: { lines: AuditLine[] }) {
  if (lines.length === 0) return <p class="quiet">No changes yet.</p>;
  return (
    <Table
      label="Audit, newest first"
      heads={["When", "Who", "What", "Outcome", "Lock", "From", "Reason"]}
      rows={lines.map((line, n) => ({
        key: `${line.at_ms} ${n}`,
        cells: [
          <span class="number">{clock(line.at_ms)}</span>,
          shown(line.who),
          line.action,
          line.outcome.replaceAll("_", " "),
          <button type="button" class="link mono" onClick={() => open(line.name)}>{shown(line.name)}</button>,
          line.owner === null ? <span class="mono">{line.holder_id}</span> : shown(line.owner),
          shown(line.reason),
        ],
      }))}
    />
  );
}

const KINDS: Record<string, string> = { unreleased: "not released", unprotected: "ran without the lock" };

interface Line {
  key: string;
  cells: ComponentChildren[];
}

/** A table; on a phone, one card per row. The roles are explicit because browsers drop them with this layout. */
function Table({ label, heads, rows }: { label: string; heads: string[]; rows: Line[] }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <table class="plain stacked" role="table">
        <thead role="rowgroup">
          <tr role="row">
            {heads.map((head) => <th scope="col" role="columnheader" key={head}>{head || <span class="unseen">Settle</span>}</th>)}
          </tr>
        </thead>
        <tbody role="rowgroup">
          {rows.map(({ key, cells }) => (
            <tr role="row" key={key}>
              {cells.map((cell, n) => <td role="cell" key={heads[n]} data-head={heads[n]}>{cell}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
