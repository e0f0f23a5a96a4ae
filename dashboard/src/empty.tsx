import { notify } from "./state";

const FIRST = "leasehold run my-first-lock -- sleep 60";
const DEMO = "leasehold demo";

/** The page of an empty store. */
export function Empty() {
  return (
    <section class="panel empty" aria-labelledby="empty-title">
      <svg width="220" height="64" viewBox="0 0 220 64" aria-hidden="true">
        <path class="lane-line" d="M0 16H220M0 48H220" />
        <rect class="owner-0" x="10" y="8" width="86" height="16" rx="4" />
        <rect class="owner-1" x="98" y="8" width="70" height="16" rx="4" />
        <path class="hatching" d="M40 34l5-6M50 34l5-6M60 34l5-6M70 34l5-6M80 34l5-6M90 34l5-6" />
        <rect class="owner-3" x="60" y="40" width="120" height="16" rx="4" />
      </svg>
      <h2 id="empty-title">No lock was held in the last hour</h2>
      <p>Take one in another terminal. It appears here within a second.</p>
      <Command text={FIRST} />
      <p>Or watch a dozen workers share locks and GPUs, with a crash, a hang and an eviction:</p>
      <Command text={DEMO} />
    </section>
  );
}

function Command({ text }: { text: string }) {
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      notify("Copied.");
    } catch {
      notify("The browser does not allow copying: select the text and copy it.", true);
    }
  };
  return (
    <div class="command">
      <code>{text.split(" ").map((word, n) => [n > 0 && " ", <span key={n}>{word}</span>])}</code>
      <button type="button" class="button small" onClick={copy} aria-label={`Copy ${text}`}>Copy</button>
    </div>
  );
}
