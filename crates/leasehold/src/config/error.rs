use std::fmt;

use super::yaml::At;

/// All problems of a configuration, each with its place.
///
/// ```
/// # use leasehold::config::Settings;
/// let mut settings = Settings::new().yaml("locks.yaml", "ttl: soon\n");
/// # let _ = leasehold::config::Config::read(&mut settings);
/// let text = settings.finish().expect_err("not a duration").to_string();
/// assert!(text.starts_with("locks.yaml:1:6: ttl: `soon` is not a duration"), "{text}");
/// assert!(text.contains("1 | ttl: soon"), "{text}");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError {
    problems: Vec<Problem>,
}

impl ConfigError {
    pub(super) fn new(problems: Vec<Problem>) -> Self {
        Self { problems }
    }

    /// Returns the problems, in the order in which they were found.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, problem) in self.problems.iter().enumerate() {
            if n > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

/// One problem of a configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub(super) origin: Origin,
    pub(super) text: String,
    /// The line of the file, without secrets.
    pub(super) snippet: Option<String>,
}

impl Problem {
    /// Returns where the problem is.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }

    /// Returns one line that says what is wrong and what would be right.
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Problem {
    /// Writes the place and the problem on one line, and the line of the file below it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.origin, self.text)?;
        if let (Some(line), Origin::File { line: number, column, .. }) = (&self.snippet, &self.origin) {
            let margin = number.to_string();
            let indent = " ".repeat(column.saturating_sub(1));
            write!(f, "\n  {margin} | {line}\n  {:width$} | {indent}^", "", width = margin.len())?;
        }
        Ok(())
    }
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// The default.
    Default,
    /// A place in a file.
    File {
        /// The name of the file, as it was given.
        file: String,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
    },
    /// A whole file that could not be read.
    WholeFile(String),
    /// An environment variable.
    Environment(String),
    /// A flag or a call of the program.
    Explicit,
}

impl Origin {
    pub(super) fn file(file: &str, at: At) -> Self {
        Self::File { file: file.to_owned(), line: at.line, column: at.column }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { file, line, column } => write!(f, "{file}:{line}:{column}"),
            Self::WholeFile(file) => f.write_str(file),
            Self::Environment(variable) => f.write_str(variable),
            Self::Explicit => f.write_str("explicit"),
        }
    }
}
