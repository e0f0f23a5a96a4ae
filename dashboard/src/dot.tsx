import { look } from "./owners";

/** An owner's colour, and its pattern where colours are used up. */
export function Dot({ owner }: { owner: string }) {
  const { colour, pattern } = look(owner);
  return <span class={`dot owner-${colour} pattern-${pattern}`} aria-hidden="true" />;
}
