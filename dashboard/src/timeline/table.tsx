import { lanes, changes } from "../live";
import { search, open } from "../state";
import { shown as escaped } from "../text";
import { clock, now, span as said, tick, took } from "../time";
import { ENDS } from "./timeline";

const ROWS = 200;

/** The timeline as a table. */
export function TimelineTable({ span }: { span: number }) {
  changes.value;
  tick.value;
  const from = now() - span;
  const text = search.value.trim().toLowerCase();
  const all = [...lanes.values()].flatMap((lane) => [...lane.tenures.values()]);
  const shown = all
    .filter((t) => (t.ended_ms ?? Infinity) >= from)
    .filter((t) => !text || t.name.toLowerCase().includes(text) || t.owner.toLowerCase().includes(text));
  shown.sort((a, b) => b.since_ms - a.since_ms);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Tenures, newest first">
      <table class="plain">
        <caption class="unseen">Who held what in the last {said(span)}, newest first</caption>
        <thead>
          <tr>
            <th scope="col">Lock</th>
            <th scope="col">Holder</th>
            <th scope="col">Since</th>
            <th scope="col">Held</th>
            <th scope="col">Waited</th>
            <th scope="col">End</th>
          </tr>
        </thead>
        <tbody>
          {shown.slice(0, ROWS).map((t) => (
            <tr key={`${t.name} ${t.holder_id}`}>
              <td>
                <button type="button" class="link mono" onClick={() => open(t.name)}>{escaped(t.name)}</button>
              </td>
              <td>{escaped(t.owner)}</td>
              <td class="number">{clock(t.since_ms)}</td>
              <td class="number">{t.ended_ms === null ? said(now() - t.since_ms) : took(t.ended_ms - t.since_ms)}</td>
              <td class="number">{t.waited_ms === null ? "–" : took(t.waited_ms)}</td>
              <td class={`end ${t.end ?? ""}`}>{t.end ? ENDS[t.end] : "held"}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {shown.length > ROWS && <p class="quiet">{shown.length - ROWS} more; a shorter time or a search shows fewer.</p>}
      {shown.length === 0 && <p class="quiet">Nothing was held in this time.</p>}
    </div>
  );
}
