//! Parsing and formatting of durations and times.

use std::time::Duration;

use leasehold::bindings::Retention;
use leasehold::lease::Ttl;

const UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];

/// Parses `500ms`, `30s`, `5m`, `1h`, `1h30m`. A number without a unit is rejected as ambiguous.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let digits = |text: &str| text.bytes().take_while(u8::is_ascii_digit).count();
    if !text.is_empty() && digits(text) == text.len() {
        return Err(format!("{text} has no unit; write {text}s, {text}ms, {text}m or {text}h"));
    }
    let unreadable = || format!("{text:?} is not a duration; write 500ms, 30s, 5m, 1h or 1h30m");
    let mut rest = text;
    let mut total_ms: u64 = 0;
    let mut above = u64::MAX;
    while !rest.is_empty() {
        let (number, tail) = rest.split_at(digits(rest));
        let letters = tail.bytes().take_while(u8::is_ascii_lowercase).count();
        let (unit, tail) = tail.split_at(letters);
        let (_, unit_ms) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(unreadable)?;
        // From large to small, each at most once: `5m1h` is probably a mistake.
        if number.is_empty() || *unit_ms >= above {
            return Err(unreadable());
        }
        let part = number.parse::<u64>().ok().and_then(|n| n.checked_mul(*unit_ms));
        total_ms = part.and_then(|p| total_ms.checked_add(p)).ok_or_else(|| format!("{text:?} is too long"))?;
        (above, rest) = (*unit_ms, tail);
    }
    if above == u64::MAX { Err(unreadable()) } else { Ok(Duration::from_millis(total_ms)) }
}

/// Parses the duration of a lease.
pub(crate) fn parse_ttl(text: &str) -> Result<Ttl, String> {
    Ttl::new(parse(text)?).map_err(|error| error.to_string())
}

/// Parses a retention, which may be in days (`7d`) as well.
pub(crate) fn parse_keep(text: &str) -> Result<Retention, String> {
    let days = text.strip_suffix('d').and_then(|days| days.parse::<u32>().ok());
    let keep = match days {
        Some(days) => Duration::from_secs(u64::from(days) * 86_400),
        None => parse(text)?,
    };
    Retention::new(keep).map_err(|error| error.to_string())
}

/// Formats a duration with at most two units: `420ms`, `38s`, `8m 40s`, `2h 05m`, `3d 04h`.
pub(crate) fn shown(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 => format!("{}ms", duration.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m {:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h {:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d {:02}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// Formats milliseconds like [`shown`].
pub(crate) fn shown_ms(ms: u64) -> String {
    shown(Duration::from_millis(ms))
}

/// Formats a wall-clock time in UTC, because holder and reader may be in different time zones. Omits the date if it is
/// within a day of `now_ms`.
pub(crate) fn clock(at_ms: u64, now_ms: u64) -> String {
    let (days, seconds) = (at_ms / 86_400_000, at_ms / 1_000 % 86_400);
    let time = format!("{:02}:{:02}:{:02} UTC", seconds / 3_600, seconds / 60 % 60, seconds % 60);
    if now_ms.abs_diff(at_ms) < 86_400_000 {
        return time;
    }
    // Days since 1970 to a date, counted in 400-year eras that begin in March.
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day_of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day_of_month = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, year) = if month < 10 { (month + 3, year) } else { (month - 9, year + 1) };
    format!("{:04}-{month:02}-{day_of_month:02} {time}", era * 400 + year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_durations() {
        let ms = |text: &str| parse(text).map(|d| d.as_millis());
        assert_eq!(ms("500ms"), Ok(500));
        assert_eq!(ms("30s"), Ok(30_000));
        assert_eq!(ms("5m"), Ok(300_000));
        assert_eq!(ms("1h"), Ok(3_600_000));
        assert_eq!(ms("1h30m"), Ok(5_400_000));
        assert_eq!(ms("1m500ms"), Ok(60_500));
        assert_eq!(ms("0s"), Ok(0));
    }

    #[test]
    fn a_number_without_a_unit_is_rejected_with_examples() {
        assert_eq!(parse("30"), Err("30 has no unit; write 30s, 30ms, 30m or 30h".into()));
    }

    #[test]
    fn rejects_everything_else() {
        for bad in ["", " ", "s", "-5s", "5 s", "5S", "5m1h", "5s5s", "1.5s", "5min", "99999999999999999999s", "5s\n"] {
            assert!(parse(bad).is_err(), "{bad:?}");
        }
        assert!(parse("18446744073709551615h").is_err());
        assert!(parse_ttl("0s").is_err());
        assert!(parse_ttl("25h").is_err());
    }

    #[test]
    fn formats_at_most_two_units() {
        let shown = |ms| shown(Duration::from_millis(ms));
        assert_eq!(shown(0), "0ms");
        assert_eq!(shown(999), "999ms");
        assert_eq!(shown(38_900), "38s");
        assert_eq!(shown(520_000), "8m 40s");
        assert_eq!(shown(242_000), "4m 02s");
        assert_eq!(shown(7_500_000), "2h 05m");
        assert_eq!(shown(273_600_000), "3d 04h");
    }

    #[test]
    fn formats_times() {
        assert_eq!(clock(1_794_866_592_000, 1_794_866_600_000), "22:03:12 UTC");
        assert_eq!(clock(0, u64::MAX), "1970-01-01 00:00:00 UTC");
        assert_eq!(clock(951_782_400_000, 0), "2000-02-29 00:00:00 UTC");
        assert_eq!(clock(1_735_689_599_000, 0), "2024-12-31 23:59:59 UTC");
        assert_eq!(clock(4_102_444_800_000, 0), "2100-01-01 00:00:00 UTC");
    }
}
