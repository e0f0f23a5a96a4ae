import { signal, useSignal } from "@preact/signals";
import { useEffect, useMemo, useRef } from "preact/hooks";
import type { Tenure, Wait } from "../api";
import { Dot } from "../dot";
import { changes, type Lane, lanes, overview, silentSince } from "../live";
import { open, search } from "../state";
import { shown } from "../text";
import { reducedMotion, theme } from "../theme";
import { clock, now, span, tick, took } from "../time";
import { AXIS, colours, draw } from "./draw";
import { BAR, type PlacedLane, type View, WAIT, order, place, waitTop, x } from "./layout";
import { TimelineTable } from "./table";

const RANGES = [5, 15, 60];
const MIN_SPAN = 20_000;
const MAX_SPAN = 3_600_000;
/** The number of lanes shown by default. */
const FEW = 9;
const MANY = 60;
/** The shortest interval between two changes of the lane order. */
const REORDER = 3_000;

/** The visible range and its end; `null` follows the current time. */
const width = signal(5 * 60_000);
const until = signal<number | null>(null);

interface Hover {
  left: number;
  top: number;
  lane: PlacedLane;
  tenure?: Tenure;
  wait?: Wait;
}

export function Timeline() {
  const all = useSignal(false);
  const asTable = useSignal(false);
  const hover = useSignal<Hover | null>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const plot = useRef<HTMLDivElement>(null);
  const state = useRef({ width: 0, lanes: [] as PlacedLane[], names: [] as string[], ordered: 0, height: 0, drag: null as Drag | null });
  const labels = useSignal<PlacedLane[]>([]);
  const count = useSignal(0);

  const view = (): View => {
    const to = until.value ?? now() + width.value * 0.03;
    return { from: to - width.value, to, width: state.current.width };
  };

  const wanted = (name: string, lane: Lane): boolean => {
    const text = search.value.trim().toLowerCase();
    if (!text) return true;
    if (name.toLowerCase().includes(text)) return true;
    for (const { owner } of lane.tenures.values()) if (owner.toLowerCase().includes(text)) return true;
    return false;
  };

  // Chooses and orders the lanes: not in every frame, and not while the pointer is over one.
  const reorder = () => {
    const { from, to } = view();
    const names = order(lanes, from, Math.min(to, now()), wanted);
    count.value = names.length;
    state.current.names = names.slice(0, all.value ? MANY : FEW);
    state.current.ordered = Date.now();
  };

  const layout = () => {
    const placed = place(lanes, state.current.names, view());
    state.current.lanes = placed.lanes;
    state.current.height = placed.height + AXIS;
    const same = labels.value.length === placed.lanes.length && placed.lanes.every((lane, n) => {
      const label = labels.value[n];
      return label && label.name === lane.name && label.top === lane.top && label.height === lane.height && waitingIn(label) === waitingIn(lane) && isHeld(label) === isHeld(lane);
    });
    if (!same) labels.value = placed.lanes;
  };

  useEffect(() => {
    reorder();
  }, [all.value, search.value, width.value, until.value === null]);

  useEffect(() => {
    const element = canvas.current;
    const context = element?.getContext("2d");
    const box = plot.current;
    if (!element || !context || !box) return;
    let c = colours(box);
    let frame = 0;
    let drawn = 0;
    let dirty = true;
    const resize = new ResizeObserver(() => {
      state.current.width = box.clientWidth;
      dirty = true;
    });
    resize.observe(box);
    state.current.width = box.clientWidth;
    const unsubscribe = [theme.subscribe(() => {
      requestAnimationFrame(() => {
        c = colours(box);
        dirty = true;
      });
    }), changes.subscribe(() => (dirty = true)), hover.subscribe(() => (dirty = true)), until.subscribe(() => (dirty = true)), width.subscribe(() => (dirty = true))];
    const paint = (time: number) => {
      frame = requestAnimationFrame(paint);
      const stale = Boolean(overview.value?.store_down_since_ms || silentSince.value);
      // A frame for each half pixel of movement; one per second with reduced motion.
      const moves = until.value === null && !stale;
      const every = reducedMotion.matches ? 1_000 : Math.max(33, width.value / Math.max(state.current.width, 1) / 2);
      if (!dirty && !(moves && time - drawn >= every)) return;
      drawn = time;
      dirty = false;
      if (!hover.value && !state.current.drag && Date.now() - state.current.ordered > REORDER) reorder();
      else if (state.current.names.length === 0) reorder();
      layout();
      const { width: w, height: h } = state.current;
      const ratio = window.devicePixelRatio || 1;
      if (element.width !== Math.round(w * ratio) || element.height !== Math.round(h * ratio)) {
        element.width = Math.round(w * ratio);
        element.height = Math.round(h * ratio);
        element.style.height = `${h}px`;
      }
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      const at = hover.value;
      draw(context, { lanes: state.current.lanes, view: view(), now: stale ? (overview.value?.store_down_since_ms ?? silentSince.value ?? now()) : now(), hovered: at?.tenure ?? at?.wait, stale }, c, h);
    };
    frame = requestAnimationFrame(paint);
    return () => {
      cancelAnimationFrame(frame);
      resize.disconnect();
      unsubscribe.forEach((end) => end());
    };
  }, [asTable.value]);

  const hit = (event: PointerEvent): Hover | null => {
    const box = canvas.current?.getBoundingClientRect();
    if (!box) return null;
    const left = event.clientX - box.left;
    const top = event.clientY - box.top - AXIS;
    const lane = state.current.lanes.find((l) => top >= l.top && top < l.top + l.height);
    if (!lane) return null;
    const v = view();
    const at = { left, top: top + AXIS, lane };
    const covers = (since: number, ended: number | null) => x(v, since) - 2 <= left && Math.max(x(v, ended ?? now()), x(v, since) + 3) + 2 >= left;
    if (top >= lane.bar - 3 && top <= lane.bar + BAR + 1) {
      const tenure = lane.tenures.findLast((t) => covers(t.since_ms, t.ended_ms));
      if (tenure) return { ...at, tenure };
    }
    const wait = lane.waits.find(({ wait: w, row }) => {
      const y = waitTop(lane, row);
      return top >= y - 1 && top <= y + WAIT + 1 && covers(w.since_ms, w.ended_ms);
    })?.wait;
    return wait ? { ...at, wait } : at;
  };

  const zoom = (factor: number, fixed: number) => {
    const v = view();
    const next = Math.min(MAX_SPAN, Math.max(MIN_SPAN, width.value * factor));
    // The time under the pointer stays there, unless the view follows the current time.
    if (until.value !== null || fixed < 0.9) {
      const at = v.from + fixed * (v.to - v.from);
      settle(at + (1 - fixed) * next, next);
    }
    width.value = next;
  };

  const settle = (to: number, span_: number) => {
    const latest = now() + span_ * 0.03;
    const earliest = now() - MAX_SPAN + span_;
    until.value = to >= latest - span_ * 0.004 ? null : Math.max(to, Math.min(earliest, latest));
  };

  const pan = (part: number) => settle((until.value ?? now() + width.value * 0.03) + part * width.value, width.value);

  const wheel = (event: WheelEvent) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) return pan(event.deltaX / 1_500);
    const box = canvas.current?.getBoundingClientRect();
    if (box) zoom(Math.exp(event.deltaY / 500), (event.clientX - box.left) / box.width);
  };

  useEffect(() => {
    const element = canvas.current;
    // Not passive: zooming must not scroll the page.
    element?.addEventListener("wheel", wheel, { passive: false });
    return () => element?.removeEventListener("wheel", wheel);
  }, [asTable.value]);

  const down = (event: PointerEvent) => {
    if (event.button !== 0) return;
    canvas.current?.setPointerCapture(event.pointerId);
    state.current.drag = { x: event.clientX, to: until.value ?? now() + width.value * 0.03, moved: false };
  };
  const move = (event: PointerEvent) => {
    const drag = state.current.drag;
    if (!drag) {
      hover.value = hit(event);
      return;
    }
    const by = event.clientX - drag.x;
    if (Math.abs(by) > 3) drag.moved = true;
    if (!drag.moved) return;
    hover.value = null;
    settle(drag.to - (by / Math.max(state.current.width, 1)) * width.value, width.value);
  };
  const up = (event: PointerEvent) => {
    const drag = state.current.drag;
    state.current.drag = null;
    const at = hit(event);
    if (drag && !drag.moved && at) open(at.lane.name);
  };

  const range = width.value / 60_000;
  const summary = useMemo(() => describe(), [Math.floor(tick.value / 5_000)]);
  return (
    <section class="panel timeline" aria-labelledby="timeline-title">
      <header class="panel-head">
        <h2 id="timeline-title">Timeline</h2>
        <Legend />
        <div class="tools">
          {until.value !== null && !asTable.value && (
            <button type="button" class="button small" onClick={() => (until.value = null)}>
              Follow now
            </button>
          )}
          {!asTable.value && (
            <div class="joined" role="group" aria-label="Move and zoom">
              <button type="button" class="icon" aria-label="Earlier" title="Earlier (drag)" onClick={() => pan(-0.5)}>‹</button>
              <button type="button" class="icon" aria-label="Later" title="Later (drag)" onClick={() => pan(0.5)}>›</button>
              <button type="button" class="icon" aria-label="Zoom out" title="Zoom out (wheel)" onClick={() => zoom(1.6, until.value === null ? 1 : 0.5)}>−</button>
              <button type="button" class="icon" aria-label="Zoom in" title="Zoom in (wheel)" onClick={() => zoom(1 / 1.6, until.value === null ? 1 : 0.5)}>+</button>
            </div>
          )}
          <div class="joined" role="group" aria-label="How far back">
            {RANGES.map((minutes) => (
              <button
                type="button"
                key={minutes}
                aria-pressed={range === minutes}
                onClick={() => {
                  width.value = minutes * 60_000;
                  until.value = null;
                }}
              >
                {minutes} min
              </button>
            ))}
          </div>
          <button type="button" class="button small" aria-pressed={asTable.value} onClick={() => (asTable.value = !asTable.value)}>
            {asTable.value ? "Show chart" : "Show table"}
          </button>
        </div>
      </header>
      <p class="unseen">{summary}</p>
      {asTable.value ? (
        <TimelineTable span={width.value} />
      ) : (
        <div class="picture">
          <div class="lanes" role="list" aria-label="Locks in the timeline">
            {labels.value.map((lane) => (
              <LaneLabel key={lane.name} lane={lane} />
            ))}
          </div>
          <div class="plot" ref={plot}>
            <canvas
              ref={canvas}
              aria-hidden="true"
              onPointerDown={down}
              onPointerMove={move}
              onPointerUp={up}
              onPointerCancel={() => (state.current.drag = null)}
              onPointerLeave={() => (hover.value = null)}
            />
            {count.value === 0 && <p class="quiet">Nothing was held in this time.</p>}
            {hover.value && !state.current.drag && <Card hover={hover.value} width={state.current.width} />}
          </div>
        </div>
      )}
      {!asTable.value && count.value > FEW && (
        <button type="button" class="more" onClick={() => (all.value = !all.value)}>
          {all.value ? "Show fewer locks" : `Show ${Math.min(count.value, MANY) - FEW} more ${count.value - FEW === 1 ? "lock" : "locks"}`}
          {all.value && count.value > MANY ? ` (${MANY} of ${count.value}; search narrows them down)` : ""}
        </button>
      )}
    </section>
  );
}

interface Drag {
  x: number;
  to: number;
  moved: boolean;
}

const waitingIn = (lane: PlacedLane): number => lane.waits.filter(({ wait }) => wait.ended_ms === null).length + lane.more;
const isHeld = (lane: PlacedLane): boolean => lane.tenures.at(-1)?.ended_ms === null;

function LaneLabel({ lane }: { lane: PlacedLane }) {
  const waiting = waitingIn(lane);
  const held = isHeld(lane);
  return (
    <div class="lane" role="listitem" style={{ height: `${lane.height}px` }}>
      <button type="button" class={held ? "held" : "free"} onClick={() => open(lane.name)} title={shown(lane.name)}>
        <span class="name">{shown(lane.name)}</span>
        {waiting > 0 && <span class="waiting">{waiting} waiting</span>}
      </button>
    </div>
  );
}

function Card({ hover: { left, top, lane, tenure, wait }, width: room }: { hover: Hover; width: number }) {
  tick.value;
  if (!tenure && !wait) return null;
  const style = { left: `${Math.min(Math.max(left - 20, 8), Math.max(room - 268, 8))}px`, top: `${top + 18}px` };
  const owner = (tenure ?? wait)?.owner ?? "";
  return (
    <div class="card" style={style} aria-hidden="true">
      <strong>
        <Dot owner={owner} /> {shown(owner)}
      </strong>
      <span class="on">{shown(lane.name)}</span>
      {tenure && (
        <dl>
          <dt>held</dt>
          <dd>{tenure.ended_ms === null ? `${span(now() - tenure.since_ms)} so far` : took(tenure.ended_ms - tenure.since_ms)}</dd>
          <dt>since</dt>
          <dd>{clock(tenure.since_ms)}</dd>
          {tenure.waited_ms !== null && (
            <>
              <dt>waited</dt>
              <dd>{took(tenure.waited_ms)}</dd>
            </>
          )}
          {tenure.fence !== null && (
            <>
              <dt>fence</dt>
              <dd class="mono">{tenure.fence}</dd>
            </>
          )}
          {tenure.end && (
            <>
              <dt>end</dt>
              <dd class={`end ${tenure.end}`}>{ENDS[tenure.end]}</dd>
            </>
          )}
        </dl>
      )}
      {wait && (
        <dl>
          <dt>waiting</dt>
          <dd>{wait.ended_ms === null ? `${span(now() - wait.since_ms)} so far` : took(wait.ended_ms - wait.since_ms)}</dd>
          <dt>since</dt>
          <dd>{clock(wait.since_ms)}</dd>
        </dl>
      )}
    </div>
  );
}

export const ENDS = {
  released: "released",
  lost: "lost: could not be renewed",
  revoked: "revoked: told to stop",
  forced: "forced: freed at once",
  expired: "expired: not released",
};

function Legend() {
  return (
    <ul class="legend" aria-label="Legend of ends">
      {(["released", "lost", "revoked", "forced", "expired"] as const).map((end) => (
        <li key={end}>
          <svg width="22" height="14" viewBox="0 0 22 14" aria-hidden="true">
            {end === "expired" && (
              <>
                <rect x="0" y="4" width="6" height="8" rx="1" class="bar" />
                <rect x="7" y="4" width="3" height="8" class="bar" opacity=".55" />
                <rect x="11" y="4" width="3" height="8" class="bar" opacity=".3" />
                <rect x="15" y="4" width="2" height="8" class="bar" opacity=".15" />
              </>
            )}
            {end !== "expired" && <rect x="0" y="4" width="16" height="8" rx="1" class="bar" />}
            {end === "lost" && <rect x="15" y="2" width="3" height="12" class="bad" />}
            {end === "revoked" && <path d="M17 4 L11 8 L17 12 Z" class="warn" />}
            {end === "forced" && <path d="M15 0 h1.6 v1 L22 3.5 L16.6 6 V13 H15 Z" class="bad" />}
          </svg>
          {end}
        </li>
      ))}
      <li>
        <svg width="22" height="14" viewBox="0 0 22 14" aria-hidden="true">
          <path d="M1 11 l4 -5 M6 11 l4 -5 M11 11 l4 -5 M16 11 l4 -5" class="hatch" />
        </svg>
        waiting
      </li>
    </ul>
  );
}

/** A summary for screen readers. */
function describe(): string {
  const since = now() - width.peek();
  let tenures = 0;
  let handed = 0;
  let bad = 0;
  for (const lane of lanes.values()) {
    for (const tenure of lane.tenures.values()) {
      if ((tenure.ended_ms ?? Infinity) < since) continue;
      tenures += 1;
      if (tenure.after) handed += 1;
      if (tenure.end && tenure.end !== "released") bad += 1;
    }
  }
  return `In the last ${span(width.peek())}: ${tenures} tenures, ${handed} handed off to a waiter, ${bad} with a bad end. The button “Show table” lists them.`;
}
