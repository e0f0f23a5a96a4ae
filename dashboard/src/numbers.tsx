import type { Point } from "./api";
import { overview } from "./live";
import { now, span, tick } from "./time";

export function Numbers() {
  const known = overview.value;
  tick.value;
  const history = known?.history ?? [];
  const stale = known?.store_down_since_ms ?? null;
  // The wait goes on between two polls.
  const drift = known && stale === null ? Math.max(0, now() - (known.looked_ms ?? now())) : 0;
  const longest = known && known.waiting > 0 ? known.longest_wait_ms + drift : 0;
  const bad = known?.bad_ends_last_hour ?? 0;
  return (
    <section class="numbers" aria-label="Five numbers">
      <Tile label="Held" value={count(known?.held)} of={history} pick={(p) => p.held} />
      <Tile label="Waiting" value={count(known?.waiting)} of={history} pick={(p) => p.waiting} />
      <Tile label="Longest wait now" value={known ? (longest > 0 ? span(longest) : "none") : "–"} of={history} pick={(p) => p.longest_wait_ms} />
      <Tile label="Hand-offs per minute" value={count(known?.handoffs_per_minute)} of={history} pick={(p) => p.handoffs * 2} bars />
      <Tile label="Bad ends, last hour" value={count(known?.bad_ends_last_hour)} of={history} pick={(p) => p.bad_ends} bars tone={bad > 0 ? "bad" : ""} hint="Lost, revoked, forced, expired or released in an emergency" />
    </section>
  );
}

const count = (n: number | undefined): string => (n === undefined ? "–" : n.toLocaleString("en"));

function Tile(props: { label: string; value: string; of: Point[]; pick: (point: Point) => number; bars?: boolean; tone?: string; hint?: string }) {
  return (
    <div class={`tile ${props.tone ?? ""}`} title={props.hint}>
      <span class="label">{props.label}</span>
      <span class="value">{props.value}</span>
      <Spark values={padded(props.of).map((point) => (point ? props.pick(point) : null))} bars={props.bars ?? false} />
    </div>
  );
}

const POINTS = 60;

/** Always covers half an hour, even if the server started later. */
function padded(history: Point[]): (Point | null)[] {
  return [...Array.from({ length: Math.max(0, POINTS - history.length) }, () => null), ...history];
}

/** A sparkline of the last half hour. */
function Spark({ values, bars }: { values: (number | null)[]; bars: boolean }) {
  const [width, height] = [120, 30];
  const top = Math.max(1, ...values.map((v) => v ?? 0)) * 1.08;
  const step = width / values.length;
  const y = (v: number) => height - 1.5 - (v / top) * (height - 4);
  if (bars) {
    return (
      <svg class="spark" viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" aria-hidden="true">
        <path class="base" d={`M0 ${height - 0.75}H${width}`} />
        {values.map((v, n) => (v ? <rect key={n} class="column" x={n * step + 0.25} width={step - 0.5} y={y(v)} height={height - y(v)} /> : null))}
      </svg>
    );
  }
  const points = values.map((v, n) => (v === null ? null : [(n + 0.5) * step, y(v)] as const)).filter((p) => p !== null);
  const first = points[0];
  const last = points.at(-1);
  const line = points.map(([px, py], n) => `${n ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
  return (
    <svg class="spark" viewBox={`0 0 ${width} ${height}`} preserveAspectRatio="none" aria-hidden="true">
      <path class="base" d={`M0 ${height - 0.75}H${width}`} />
      {first && last && <path class="area" d={`${line}L${last[0]} ${height}L${first[0]} ${height}Z`} />}
      {points.length > 1 && <path class="stroke" d={line} />}
      {last && points.length === 1 && <rect class="column" x={last[0] - 1} width="2" y={last[1] - 1} height="2" />}
    </svg>
  );
}
