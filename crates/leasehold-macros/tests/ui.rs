//! Everything that can be written wrongly, and what the compiler says to it. After a change of the
//! messages: `TRYBUILD=overwrite cargo test -p leasehold-macros --test ui`.

#[test]
fn mistakes_are_told_at_their_place() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/*.rs");
}
