//! The same tests for every store.
//!
//! To add a store, implement its [`World`](support::World) and add a `mount!` line.

use crate::support::{MemoryHere, RedisHere, SqliteHere, holding, looking, queueing, taking};

macro_rules! mount {
    ($store:ident: $world:expr) => {
        mount! {
            @ $store $world =>
            holding::a_free_lock_is_granted_and_then_held
            holding::only_its_token_releases_a_lock
            holding::fences_rise_over_every_way_to_a_grant
            holding::an_unfenced_grant_has_no_fence
            holding::a_try_sent_twice_is_granted_twice
            holding::an_acquire_sent_twice_keeps_its_ticket
            holding::a_release_sent_twice_frees_once
            holding::late_calls_never_touch_a_successor
            holding::a_renewal_with_another_fence_is_lost
            holding::a_renewal_can_rewrite_ttl_and_owner
            holding::a_renewal_never_shortens
            holding::a_check_reports_the_holder_and_changes_nothing
            holding::a_lease_can_be_handed_to_another_token
            holding::many_renewals_are_answered_in_order
            queueing::waiters_are_served_in_order
            queueing::the_next_waiter_is_asked_to_look_again
            queueing::a_dead_waiter_is_passed_over
            queueing::hundreds_of_dead_waiters_are_passed_over
            queueing::a_waiter_leaves_the_queue
            queueing::a_waiter_leaves_what_it_was_granted
            queueing::a_lost_push_is_found_by_the_next_request
            queueing::a_try_yields_to_waiters
            queueing::whoever_comes_by_serves_the_first
            queueing::a_polling_waiter_is_served_if_it_polled_lately
            queueing::a_polling_waiter_that_stopped_is_passed_over
            taking::a_revoked_holder_cannot_renew_and_hands_on
            taking::a_revoked_waiting_room_learns_it_with_its_next_request
            taking::force_hands_on_at_once
            taking::an_old_holder_is_not_evicted_again
            taking::a_free_lock_is_not_evicted
            taking::a_holder_is_asked_to_finish
            taking::a_request_to_a_holder_that_does_not_listen_is_undeliverable
            looking::a_list_has_every_lock_once
            looking::a_list_keeps_to_its_prefix
            looking::a_queue_is_shown_in_order
            looking::counters_add_up
            looking::events_reach_a_follower
            looking::long_held_locks_are_found
            looking::long_held_locks_come_in_pages
        }
    };
    (@ $store:ident $world:expr => $($about:ident :: $case:ident)*) => {
        mod $store {
            use super::*;
            $(#[tokio::test]
            async fn $case() {
                $about::$case(&$world).await;
            })*
        }
    };
}

mount!(sqlite: SqliteHere::new());
mount!(memory: MemoryHere::default());
mount!(redis: RedisHere::start().await);
