import { computed, signal, useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import type { Seen } from "./api";
import { Dot } from "./dot";
import { changes, locks, overview, silentSince, warningMs } from "./live";
import { type Filter, evicting, filters, open, opened, notify, search } from "./state";
import { shown } from "./text";
import { narrow } from "./theme";
import { now, span, tick } from "./time";

type Column = "name" | "owner" | "held" | "lease" | "seen" | "waiters";
const sort = signal<{ by: Column; down: boolean } | null>(null);

const ROW = 42;
const CARD = 112;
/** Extra rows above and below the viewport, so that fast scrolling shows no gaps. */
const SPARE = 8;

/** Changes once a second, for values that depend on the time (locks over the warning level). */
const second = computed(() => Math.floor(tick.value / 1_000));

export const rows = computed<Seen[]>(() => {
  changes.value;
  const wanted = filters.value;
  const text = search.value.trim().toLowerCase();
  const limit = wanted.has("warning") ? (second.value, now() - warningMs()) : 0;
  const found: Seen[] = [];
  for (const lock of locks.values()) {
    if (wanted.has("contended") && lock.waiters.length === 0) continue;
    if (wanted.has("foreign") && !lock.foreign) continue;
    if (wanted.has("warning") && (lock.since_ms === null || lock.since_ms > limit)) continue;
    if (text && !lock.name.toLowerCase().includes(text) && !(lock.owner ?? "").toLowerCase().includes(text) && !lock.waiters.some((w) => w.owner.toLowerCase().includes(text))) continue;
    found.push(lock);
  }
  const by = sort.value;
  const first = (a: string, b: string) => (a < b ? -1 : a > b ? 1 : 0);
  const keys: Record<Column, (a: Seen, b: Seen) => number> = {
    name: (a, b) => first(a.name, b.name),
    owner: (a, b) => first(a.owner ?? "", b.owner ?? ""),
    held: (a, b) => (b.since_ms ?? Infinity) - (a.since_ms ?? Infinity),
    lease: (a, b) => left(a) - left(b),
    seen: (a, b) => (b.last_seen_ms ?? 0) - (a.last_seen_ms ?? 0),
    waiters: (a, b) => a.waiters.length - b.waiters.length,
  };
  if (by) {
    const compare = keys[by.by];
    found.sort((a, b) => (by.down ? -compare(a, b) : compare(a, b)) || first(a.name, b.name));
  } else {
    // Contended locks first, then the longest held.
    found.sort((a, b) => Number(b.waiters.length > 0) - Number(a.waiters.length > 0) || (a.since_ms ?? Infinity) - (b.since_ms ?? Infinity) || first(a.name, b.name));
  }
  return found;
});

/** When a lease ends unless it is renewed. */
const left = (lock: Seen): number => (lock.ttl_left_ms === null ? Infinity : lock.at_ms + lock.ttl_left_ms);

export function Locks() {
  const found = rows.value;
  const selected = useSignal<string | null>(null);
  const box = useRef<HTMLDivElement>(null);
  const height = narrow.value ? CARD : ROW;
  const [from, to] = useVisible(box, found.length, height, narrow.value);
  const index = selected.value === null ? -1 : found.findIndex((lock) => lock.name === selected.value);

  const keys = (event: KeyboardEvent) => {
    const at = index < 0 ? -1 : index;
    const page = Math.max(1, Math.floor((box.current?.clientHeight ?? 400) / height) - 1);
    const to_: Record<string, number> = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: found.length - 1 };
    const target = to_[event.key];
    if (target !== undefined) {
      event.preventDefault();
      const next = Math.min(Math.max(target, 0), found.length - 1);
      selected.value = found[next]?.name ?? null;
      reveal(box.current, next, height);
      return;
    }
    const lock = found[index];
    if (!lock || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Enter") open(lock.name);
    else if (event.key === "e") evict(lock);
  };

  return (
    <div class="locks">
      <Filters shown={found.length} />
      <div
        class={narrow.value ? "grid cards" : "grid"}
        role="grid"
        aria-label="Locks"
        aria-rowcount={found.length + 1}
        aria-colcount={7}
        tabIndex={0}
        aria-activedescendant={index >= from && index < to ? `lock-${index}` : undefined}
        onKeyDown={keys}
        onFocus={() => {
          if (selected.value === null || index < 0) selected.value = found[0]?.name ?? null;
        }}
      >
        <Head />
        <div class="body" role={found.length > 0 ? "rowgroup" : "presentation"} ref={box}>
          <div class="height" role="presentation" style={{ height: `${found.length * height}px` }}>
            {found.slice(from, to).map((lock, n) => (
              <Row key={lock.name} lock={lock} index={from + n} top={(from + n) * height} selected={lock.name === selected.value} select={() => (selected.value = lock.name)} />
            ))}
          </div>
          {found.length === 0 && <p class="quiet" role="presentation">{locks.size > 0 ? "No lock matches." : "No lock is held."}</p>}
        </div>
      </div>
      {!narrow.value && (
        <p class="hint" aria-hidden="true">
          <kbd>↑</kbd> <kbd>↓</kbd> choose · <kbd>Enter</kbd> open · <kbd>e</kbd> evict · <kbd>/</kbd> search
        </p>
      )}
    </div>
  );
}

/** The visible rows: of a scrolling box or, on a phone, of the page. */
function useVisible(box: { current: HTMLDivElement | null }, count: number, height: number, whole: boolean): [number, number] {
  const top = useSignal(0);
  const room = useSignal(800);
  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const measure = () => {
      top.value = whole ? Math.max(0, -element.getBoundingClientRect().top) : element.scrollTop;
      room.value = whole ? window.innerHeight : element.clientHeight;
    };
    measure();
    const target: EventTarget = whole ? window : element;
    target.addEventListener("scroll", measure, { passive: true });
    const resize = new ResizeObserver(measure);
    resize.observe(element);
    return () => {
      target.removeEventListener("scroll", measure);
      resize.disconnect();
    };
  }, [whole]);
  const from = Math.max(0, Math.floor(top.value / height) - SPARE);
  return [Math.min(from, Math.max(0, count - 1)), Math.min(count, Math.ceil((top.value + room.value) / height) + SPARE)];
}

function reveal(box: HTMLDivElement | null, index: number, height: number): void {
  if (!box) return;
  const top = index * height;
  if (top < box.scrollTop) box.scrollTop = top;
  else if (top + height > box.scrollTop + box.clientHeight) box.scrollTop = top + height - box.clientHeight;
}

/** Opens the evict dialog for the current holder. */
export function evict(lock: { name: string; held: boolean; holder_id: string | null; owner: string | null }): void {
  if (overview.value?.role === "viewer") return notify("This key can only read: evicting needs an operator key.", true);
  if (!lock.held || !lock.holder_id) return notify(`${shown(lock.name)} is free: there is no holder to evict.`);
  evicting.value = { name: lock.name, holderId: lock.holder_id, owner: lock.owner ?? "somebody" };
}

const HEADS: [Column | null, string, string][] = [
  ["name", "Lock", "name"],
  ["owner", "Holder", "owner"],
  ["held", "Held for", "held"],
  ["lease", "Lease", "lease"],
  ["seen", "Sign of life", "seen"],
  [null, "Connected", "connected"],
  ["waiters", "Waiting", "waiters"],
];

function Head() {
  const by = sort.value;
  return (
    <div class="row head" role="row" aria-rowindex={1}>
      {HEADS.map(([column, title, name]) => {
        const on = column !== null && by?.by === column;
        return (
          <div key={name} class={`cell ${name}`} role="columnheader" aria-sort={on ? (by.down ? "descending" : "ascending") : undefined}>
            {column ? (
              <button
                type="button"
                onClick={() => {
                  // Names sort ascending first, numbers descending; the third click restores the default order.
                  const begin = column !== "name" && column !== "owner" && column !== "lease";
                  sort.value = !on ? { by: column, down: begin } : by.down === begin ? { by: column, down: !begin } : null;
                }}
              >
                {title}
                <span class="arrow" aria-hidden="true">{on ? (by.down ? "↓" : "↑") : ""}</span>
              </button>
            ) : (
              title
            )}
          </div>
        );
      })}
    </div>
  );
}

function Row({ lock, index, top, selected, select }: { lock: Seen; index: number; top: number; selected: boolean; select: () => void }) {
  tick.value;
  const frozen = overview.value?.store_down_since_ms ?? silentSince.value;
  const at = frozen ?? now();
  const held = lock.since_ms === null ? null : at - lock.since_ms;
  const over = held !== null && held > warningMs();
  return (
    <div
      id={`lock-${index}`}
      class={`row${selected ? " selected" : ""}${opened.value === lock.name ? " opened" : ""}`}
      role="row"
      aria-rowindex={index + 2}
      aria-selected={selected}
      style={{ transform: `translateY(${top}px)` }}
      onClick={() => {
        select();
        open(lock.name);
      }}
    >
      <div class="cell name" role="gridcell">
        <span class="text mono" title={shown(lock.name)}>{shown(lock.name)}</span>
        {lock.foreign && <span class="tag foreign" title="Held by another kind of client">foreign</span>}
        {lock.revoked && <span class="tag warn" title="Its holder has been told to stop">revoked</span>}
      </div>
      <div class="cell owner" role="gridcell">
        {lock.held ? (
          <>
            <Dot owner={lock.owner ?? ""} />
            <Owner owner={lock.owner ?? ""} />
          </>
        ) : (
          <span class="faint">being handed off</span>
        )}
      </div>
      <div class={over ? "cell held over" : "cell held"} role="gridcell">
        {held === null ? "–" : span(held)}
        {over && <span class="unseen">, over the warning level</span>}
      </div>
      <div class="cell lease" role="gridcell"><Lease lock={lock} at={at} /></div>
      <div class="cell seen" role="gridcell">{lock.last_seen_ms === null ? "–" : `${span(at - lock.last_seen_ms)} ago`}</div>
      <div class="cell connected" role="gridcell"><Connected lock={lock} /></div>
      <div class="cell waiters" role="gridcell">
        {lock.waiters.length > 0 ? <span class="count">{lock.waiters.length}</span> : <span class="faint">0</span>}
      </div>
    </div>
  );
}

/** An owner: the worker, then its host in a smaller font. */
export function Owner({ owner }: { owner: string }) {
  const text = shown(owner);
  const parts = /^(.*?)(@[^@]*)$/s.exec(text);
  return (
    <span class="text" title={text}>
      {parts ? parts[1] : text}
      {parts && <span class="faint">{parts[2]}</span>}
    </span>
  );
}

export function Connected({ lock }: { lock: Seen | { connected: boolean | null; foreign: boolean } }) {
  if (lock.connected === null) return <span class="faint" title={lock.foreign ? "Unknown: another kind of client" : "A lease that is not tied to a process"}>–</span>;
  return lock.connected ? <span class="yes">yes</span> : <span class="no">gone</span>;
}

/** The remaining time of a lease as a bar. */
export function Lease({ lock, at }: { lock: Seen; at: number }) {
  if (lock.ttl_left_ms === null) return <span class="faint">{lock.held ? "no end" : "–"}</span>;
  const remaining = Math.max(0, lock.at_ms + lock.ttl_left_ms - at);
  const whole = Math.max(lock.ttl_ms ?? 0, lock.ttl_left_ms, 1);
  const part = Math.min(1, remaining / whole);
  return (
    <span class="lease-bar">
      <span class="track" aria-hidden="true">
        <span class={part < 0.25 ? "fill low" : "fill"} style={{ transform: `scaleX(${part.toFixed(4)})` }} />
      </span>
      <span class="number">{span(remaining)}</span>
    </span>
  );
}

const number = (n: number): string => `${n.toLocaleString("en")} ${n === 1 ? "lock" : "locks"}`;

function Filters({ shown }: { shown: number }) {
  changes.value;
  let contended = 0;
  let foreign = 0;
  let over = 0;
  const limit = (second.value, now() - warningMs());
  for (const lock of locks.values()) {
    if (lock.waiters.length > 0) contended += 1;
    if (lock.foreign) foreign += 1;
    if (lock.since_ms !== null && lock.since_ms < limit) over += 1;
  }
  const all: [Filter, string, number][] = [
    ["contended", "contended", contended],
    ["warning", `over ${span(warningMs()).replace(" 00s", "")}`, over],
    ["foreign", "foreign", foreign],
  ];
  const flip = (filter: Filter) => {
    const next = new Set(filters.value);
    if (!next.delete(filter)) next.add(filter);
    filters.value = next;
  };
  return (
    <div class="filters" role="group" aria-label="Which locks">
      {all.map(([filter, title, count]) => (
        <button type="button" key={filter} class="chip" aria-pressed={filters.value.has(filter)} onClick={() => flip(filter)}>
          {title} <span class="count">{count}</span>
        </button>
      ))}
      <span class="shown" role="status">{shown === locks.size ? number(locks.size) : `${shown.toLocaleString("en")} of ${number(locks.size)}`}</span>
    </div>
  );
}
