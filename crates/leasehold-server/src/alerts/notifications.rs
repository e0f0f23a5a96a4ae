//! The metric of alert notifications.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// Counts alert notifications by sink and outcome.
#[derive(Debug, Clone)]
pub(crate) struct NotificationCounter(Family<NotificationLabels, Counter>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NotificationLabels {
    sink: &'static str,
    outcome: &'static str,
}

impl NotificationCounter {
    /// Creates every series with a count of zero: a series that first appears with a count of one shows no increase.
    pub(crate) fn new() -> Self {
        let family = Family::<NotificationLabels, Counter>::default();
        for sink in ["webhook", "command"] {
            for outcome in ["sent", "failed", "given_up", "dropped"] {
                drop(family.get_or_create(&NotificationLabels { sink, outcome }));
            }
        }
        Self(family)
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("alert_notifications", "Alert notifications, by sink and outcome", self.0.clone());
    }

    pub(super) fn count(&self, sink: &'static str, outcome: &'static str) {
        self.0.get_or_create(&NotificationLabels { sink, outcome }).inc();
    }
}
