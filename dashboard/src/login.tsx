import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { type Overview, Problem, ask, keyWanted, remember } from "./api";
import { start, stop } from "./live";

/** Keys are set here: one is asked for, and kept for this tab only. */
export function Login({ why }: { why: string }) {
  const text = useSignal("");
  const problem = useSignal(why);
  const busy = useSignal(false);
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => {
    input.current?.focus();
    stop();
  }, []);
  const enter = async (event: Event) => {
    event.preventDefault();
    const typed = text.value.trim();
    if (!typed || busy.value) return;
    busy.value = true;
    remember(typed);
    try {
      await ask<Overview>("/api/v1/overview");
      keyWanted.value = null;
      start();
    } catch (error) {
      remember("");
      problem.value = error instanceof Problem ? error.message : "The server does not answer. Try again.";
      input.current?.select();
    }
    busy.value = false;
  };
  return (
    <main class="login">
      <form class="panel" onSubmit={enter}>
        <img src="/assets/icon.svg" alt="" width="40" height="40" />
        <h1>leasehold</h1>
        <p>This server asks for a key. A viewer's may look; an operator's may also take locks away.</p>
        <label for="key">Key</label>
        <input
          id="key"
          ref={input}
          type="password"
          autocomplete="off"
          spellcheck={false}
          value={text.value}
          aria-invalid={problem.value !== ""}
          aria-describedby={problem.value ? "key-problem" : "key-help"}
          onInput={(event) => (text.value = event.currentTarget.value)}
        />
        {problem.value && <p id="key-problem" class="problem" role="alert">{problem.value}</p>}
        <button type="submit" class="button primary" disabled={busy.value}>{busy.value ? "…" : "Enter"}</button>
        <p id="key-help" class="faint">It is kept in this tab and forgotten when you close it. <code>leasehold keys create NAME</code> makes one.</p>
      </form>
    </main>
  );
}
