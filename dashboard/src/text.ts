// Texts from elsewhere, as they may be shown.

/** What cannot be seen and changes how the text around it reads: the same as the command writes out. */
const DRIVES = /[\p{Cc}\u{ad}\u{61c}\u{180e}\u{200b}-\u{200f}\u{2028}-\u{202e}\u{2060}-\u{206f}\u{feff}\u{fff9}-\u{fffb}\u{e0000}-\u{e007f}]/gu;

/** A name, an owner, a reason: `deploy\u{202e}gnp`, not a text that reads as another one. */
export const shown = (text: string): string => text.replace(DRIVES, (c) => `\\u{${(c.codePointAt(0) ?? 0).toString(16)}}`);
