import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { type Overview, Problem, request, keyWanted, remember } from "./api";
import { start, stop } from "./live";

/** The login form. The key is stored for this tab only. */
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
      await request<Overview>("/api/v1/overview");
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
        <p>This server requires a key. A viewer key can read; an operator key can also evict holders.</p>
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
        <p id="key-help" class="faint">The key is stored in this tab until you close it. Create one with <code>leasehold keys create NAME</code>.</p>
      </form>
    </main>
  );
}
