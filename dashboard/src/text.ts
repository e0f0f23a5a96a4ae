// Escaping of untrusted text.

/** Invisible characters and characters that change the text direction: those that the command escapes, too. */
const DRIVES = /[\p{Cc}\u{ad}\u{61c}\u{180e}\u{200b}-\u{200f}\u{2028}-\u{202e}\u{2060}-\u{206f}\u{feff}\u{fff9}-\u{fffb}\u{e0000}-\u{e007f}]/gu;

/** Escapes a name, an owner or a reason: `deploy\u{202e}gnp`. */
export const shown = (text: string): string => text.replace(DRIVES, (c) => `\\u{${(c.codePointAt(0) ?? 0).toString(16)}}`);
