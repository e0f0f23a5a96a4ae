//! Leases that belong to a token and to no process. Replaces `engine/by_token.rs`.

use std::cell::Cell;
use std::rc::Rc;

use super::acquiring::Ended;
use super::coverage::Situation;
use super::lease::Lease;
use super::leaving::Undo;
use super::process::{CallError, Process, Wait, Wish};
use crate::client::by_token::{AfterLook, Confirmed, TokenAnswer, TokenCall, confirmed};
use crate::client::retry::Retry;
use crate::clock::Moment;
use crate::facts::{Fence, LockName, Token, Ttl};
use crate::lease::belief::Belief;
use crate::loss::LossReason;
use crate::store::{AcquireRequest, Renewal, Renewed, StoreError, StoreErrorKind, Try};

const CONFIRMS: usize = 4;

/// What the caller by token believes after its call.
pub(super) struct TokenLease {
    pub(super) process: usize,
    pub(super) name: LockName,
    pub(super) token: Token,
    pub(super) fence: Option<Fence>,
    pub(super) valid_until: Cell<Moment>,
    /// Several calls were made with its token.
    pub(super) was_asked_twice: bool,
}

impl Process {
    /// Acquires a lock for a token. The lease lasts its full ttl from some moment during this call.
    pub(super) async fn acquire_for_token(self: Rc<Self>, wish: Wish, token: Token) -> Result<TokenLease, Ended> {
        let began = self.now();
        let by = wish.wait.answer_by(began);
        let (fence, from) = tokio::select! {
            biased;
            outcome = self.obtain_for_token(&wish, &token, began) => outcome?,
            () = self.world.sleep_until(by) => return Err(Ended::Late),
        };
        self.world.saw(Situation::GrantToToken);
        let valid_until = Belief::new(from, from, wish.ttl.duration()).valid_until();
        let (name, valid_until) = (wish.name, Cell::new(valid_until));
        Ok(TokenLease { process: self.which, name, token, fence, valid_until, was_asked_twice: false })
    }

    /// The fence, and the moment from which the lease counts.
    async fn obtain_for_token(
        self: &Rc<Self>,
        wish: &Wish,
        token: &Token,
        began: Moment,
    ) -> Result<(Option<Fence>, Moment), Ended> {
        let claim = AcquireRequest {
            name: wish.name.clone(),
            token: token.clone(),
            ttl: wish.ttl,
            owner: wish.owner.clone(),
            fenced: wish.fenced,
            listens: false,
            since_ms: 0,
        };
        let mut turn = Box::pin(self.wait(wish, None, began));
        let mut call = TokenCall::new(wish.wait != Wait::Not);
        loop {
            let asked_at = self.now();
            let counts_from = Cell::new(asked_at);
            let answer = self.within(self.ask_for_token(&claim, &counts_from)).await;
            let look_after = match self.decide(|cx| call.answered(cx, asked_at, answer)) {
                AfterLook::Granted(fence) => return Ok((fence, counts_from.get())),
                AfterLook::Revoked => return Err(CallError::Lost(LossReason::Revoked).into()),
                AfterLook::Late(_) => return Err(Ended::Late),
                AfterLook::Failed(error) => return Err(CallError::Store(error).into()),
                AfterLook::Wait { look_after, .. } => look_after,
            };
            tokio::select! {
                biased;
                guard = &mut turn, if call.waits_in_line() => {
                    let guard = match guard {
                        Err(Ended::Late) => {
                            call.waited_in_vain();
                            continue;
                        }
                        guard => guard?,
                    };
                    let fence = guard.lease().fence;
                    let from = self.now();
                    match guard.hand_to(token).await {
                        Ok(()) => {
                            self.world.saw(Situation::HandedOn);
                            return Ok((fence, from));
                        }
                        Err(CallError::Lost(LossReason::Gone | LossReason::Expired)) => {
                            turn.set(self.wait(wish, None, began));
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
                () = self.world.sleep(look_after) => {}
            }
        }
    }

    /// Turns a lease of this process into a lease by token.
    pub(super) async fn hand_on(self: Rc<Self>, lease: &Rc<Lease>, to: &Token) -> Result<(), CallError> {
        let began = self.now();
        self.stop_tending(lease);
        let (ttl, owner, lost) = {
            let state = lease.state.borrow();
            (state.ttl, state.owner.clone(), state.lost)
        };
        let (name, token) = (lease.name.clone(), lease.token.clone());
        let renewal = Renewal {
            name: name.clone(),
            token: token.clone(),
            fence: lease.fence,
            ttl,
            prolong: true,
            rewrite: Some(owner.clone()),
            hand_to: Some(to.clone()),
        };
        // The task has given up its guard.
        self.world.gave_up(&name, &token);
        let claim = AcquireRequest { name, token, ttl, owner, fenced: true, listens: true, since_ms: 0 };
        let undo = Undo::arm(&self, claim);
        if let Some(why) = lost {
            return Err(CallError::Lost(why));
        }
        let mut retry = Retry::new();
        loop {
            let asked_at = self.now();
            let asking = async { Ok(self.ask_renew(std::slice::from_ref(&renewal)).await.pop()) };
            let answer = self.within(asking).await.unwrap_or_else(|error| Some(Renewed::Unknown(error)));
            let error = match confirmed(self.now(), asked_at, ttl, &answer.expect("one answer each")) {
                Confirmed::Yes => {
                    undo.disarm();
                    return Ok(());
                }
                Confirmed::Lost(why) => {
                    self.tell_lost(lease, why);
                    return Err(CallError::Lost(why));
                }
                Confirmed::Unknown(error) => error,
            };
            match self.decide(|cx| retry.failed(cx, began, &error)) {
                Some(pause) => self.world.sleep(pause).await,
                None => return Err(CallError::Store(error)),
            }
        }
    }

    /// A try, confirmed if it is granted.
    async fn ask_for_token(
        &self,
        claim: &AcquireRequest,
        counts_from: &Cell<Moment>,
    ) -> Result<TokenAnswer, StoreError> {
        for _ in 0..CONFIRMS {
            let grant = match self.ask_try(claim).await? {
                Try::Granted(grant) => grant,
                Try::Held(None) => continue,
                Try::Held(Some(holder)) => return Ok(TokenAnswer::Held(Box::new(holder))),
                Try::Revoked => return Ok(TokenAnswer::Revoked),
            };
            let renewal = Renewal {
                name: claim.name.clone(),
                token: claim.token.clone(),
                fence: grant.fence,
                ttl: claim.ttl,
                prolong: true,
                rewrite: Some(claim.owner.clone()),
                hand_to: None,
            };
            let asked_at = self.now();
            let answer = self.ask_renew(&[renewal]).await.pop();
            match confirmed(self.now(), asked_at, claim.ttl, &answer.expect("one answer each")) {
                Confirmed::Yes => {
                    counts_from.set(asked_at);
                    return Ok(TokenAnswer::Granted(grant.fence));
                }
                Confirmed::Lost(LossReason::Revoked) => return Ok(TokenAnswer::Revoked),
                Confirmed::Lost(_) => {}
                Confirmed::Unknown(error) => return Err(error),
            }
        }
        Err(StoreErrorKind::TryAgain.into())
    }

    /// Renews a lease by its token, to its original ttl. Returns until when it is proven.
    pub(super) async fn renew_token(&self, name: &LockName, token: &Token) -> Result<Moment, CallError> {
        let store = CallError::Store;
        let holder = self.within(self.ask_holder(name)).await.map_err(store)?;
        let Some(holder) = holder.filter(|holder| holder.id == token.holder_id()) else {
            return Err(CallError::Lost(LossReason::Gone));
        };
        let ttl = holder.ttl.and_then(|ttl| Ttl::new(ttl).ok()).unwrap_or_default();
        let renewal = Renewal {
            name: name.clone(),
            token: token.clone(),
            fence: holder.fence,
            ttl,
            prolong: true,
            rewrite: None,
            hand_to: None,
        };
        let asked_at = self.now();
        let asking = async { Ok(self.ask_renew(&[renewal]).await.pop()) };
        match self.within(asking).await.map_err(store)? {
            Some(Renewed::Renewed) => Ok(Belief::new(asked_at, asked_at, ttl.duration()).valid_until()),
            Some(Renewed::Revoked) => Err(CallError::Lost(LossReason::Revoked)),
            Some(Renewed::Unknown(error)) => Err(store(error)),
            _ => Err(CallError::Lost(LossReason::Gone)),
        }
    }
}
