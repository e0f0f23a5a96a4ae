import type { Alert } from "./api";
import { Dot } from "./dot";
import { alerts, feed, type FeedEvent, overview } from "./live";
import { short } from "./owners";
import { open } from "./state";
import { shown } from "./text";
import { ago, clock, span, tick } from "./time";

export function Side({ part }: { part: "all" | "alerts" | "rest" }) {
  if (part === "alerts") return <Alerts />;
  return (
    <aside class="side" aria-label="Alerts, counters and events">
      {part === "all" && <Alerts />}
      <Counters />
      <Feed />
    </aside>
  );
}

function Alerts() {
  const all = alerts.value;
  if (all === null) return null;
  tick.value;
  const firing = all.filter((alert) => alert.resolved_ms === null);
  const resolved = all.filter((alert) => alert.resolved_ms !== null).slice(0, 5);
  return (
    <section class="panel alerts" aria-labelledby="alerts-title">
      <header class="panel-head">
        <h2 id="alerts-title">Alerts</h2>
        <span class={firing.length > 0 ? "tag bad" : "tag"}>{firing.length === 0 ? "none" : `${firing.length} firing`}</span>
      </header>
      {firing.length === 0 && resolved.length === 0 && <p class="quiet">No alerts.</p>}
      <ul>
        {firing.map((alert) => <AlertLine key={alert.id} alert={alert} />)}
        {resolved.map((alert) => <AlertLine key={alert.id} alert={alert} />)}
      </ul>
    </section>
  );
}

function AlertLine({ alert }: { alert: Alert }) {
  const over = alert.resolved_ms;
  return (
    <li class={`alert ${over === null ? alert.level : "resolved"}`}>
      <div class="first">
        <span class="level">{over === null ? alert.level : "resolved"}</span>
        <span class="type">{alert.type.replaceAll("_", " ")}</span>
        <span class="faint when" title={clock(alert.since_ms)}>{over === null ? span(Math.max(0, tick.value - alert.since_ms)) : ago(over)}</span>
      </div>
      <p>{shown(alert.message)}</p>
      <div class="last">
        {alert.name && <button type="button" class="link mono" onClick={() => open(alert.name ?? "")}>{shown(alert.name)}</button>}
        {alert.count > 1 && <span class="faint">{alert.count} times</span>}
      </div>
    </li>
  );
}

function Counters() {
  const stats = overview.value?.exception_stats;
  const rate = (part: number) => `${(part * 100).toFixed(part > 0 && part < 0.001 ? 2 : 1)} %`;
  const rows: [string, number | undefined, string | null, boolean][] = [
    ["Release failures", stats?.normal_release_failures, stats ? rate(stats.exception_rate) : null, false],
    ["Emergency releases", stats?.emergency_releases, stats ? rate(stats.emergency_release_rate) : null, (stats?.emergency_release_rate ?? 0) > 0.05],
    ["Script errors", stats?.release_script_errors, null, (stats?.release_script_errors ?? 0) > 0],
    ["Ownership violations", stats?.ownership_violations, null, (stats?.ownership_violations ?? 0) > 0],
  ];
  return (
    <section class="panel counters" aria-labelledby="counters-title">
      <header class="panel-head">
        <h2 id="counters-title">Exceptions</h2>
        <span class="faint">of all clients</span>
      </header>
      <dl>
        {rows.map(([title, count, of, bad]) => (
          <div key={title} class={bad ? "bad" : ""}>
            <dt>{title}</dt>
            <dd>
              <span class="number">{count?.toLocaleString("en") ?? "–"}</span>
              {of !== null && <span class="faint number">{of}</span>}
            </dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

const MARKS: Record<string, string> = { granted: "→", released: "←", lost: "✕", revoked: "⊘", forced: "⚑", asked_to_finish: "?" };

function Feed() {
  return (
    <section class="panel feed" aria-labelledby="feed-title">
      <header class="panel-head">
        <h2 id="feed-title">Events</h2>
      </header>
      {feed.value.length === 0 && <p class="quiet">New events appear here.</p>}
      <ol aria-label="Events, newest first">
        {feed.value.slice(0, 60).map((event) => <Line key={event.id} event={event} />)}
      </ol>
    </section>
  );
}

function Line({ event }: { event: FeedEvent }) {
  const kind = event.kind.split(" ")[0] ?? "";
  const usual = event.reason === "" || event.reason === "normal";
  return (
    <li class={`event was-${kind}`}>
      <time class="number">{clock(event.at_ms).slice(-8)}</time>
      <span class="mark" aria-hidden="true">{MARKS[kind] ?? "!"}</span>
      <span class="what">
        <span class="kind">{event.kind.replaceAll("_", " ")}</span>{" "}
        {event.name && <button type="button" class="link mono" onClick={() => open(event.name ?? "")}>{shown(event.name)}</button>}
        {event.owner && <span class="by" title={shown(event.owner)}><Dot owner={event.owner} /> {short(event.owner)}</span>}
        {!usual && <span class="reason">{shown(event.reason)}</span>}
      </span>
    </li>
  );
}
