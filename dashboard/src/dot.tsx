import { look } from "./owners";

/** A dot in an owner's colour and pattern. */
export function Dot({ owner }: { owner: string }) {
  const { colour, pattern } = look(owner);
  return <span class={`dot owner-${colour} pattern-${pattern}`} aria-hidden="true" />;
}
