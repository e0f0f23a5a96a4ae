-- The shared part of the scripts that hand a lock to a waiter. It replaces `--#head` in a script, after the
-- fast path, because these functions are built anew on every call.
--
-- KEYS   lock · queue (sorted set, ticket -> entry) · fence counter · poll marks (hash, token -> server ms)
-- value  `lh1 <flag> <token> <fence16> <inbox> <since_ms> <ttl_ms> <owner…>`, the token 32 characters
--        SETRANGE / sub:  flag 4 / 5,5 · token 6 / 7,38 · fence 39 / 40,55 · the rest 56 / 57
-- entry  `<token> <inbox> <ttl_ms> <since_ms> <owner…>`, fixed for one attempt; inbox `-`: it polls
-- push   `G <token> <fence> <ms>` granted for that time, confirm · `N <token> <ms>` look again after it
--        `R <token>` revoked · `F <token> <reason…>` please finish
-- "again"  many dead waiters were passed over, more may follow: send the same call again
--
-- No script deletes, shortens, flags or rewrites a value unless it was given its token (of a foreign value:
-- its hash). The one exception: a waiter changes flag 0 of one of our values to 1.
--#limits
local lock, queue, counter, polls = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

local function now_ms()
  return string.format('%.0f', math.floor(now_us() / 1000))
end

-- The next fence, 16 digits; or nil and the error, and nothing may be granted.
local function next_fence(seen)
  local f = redis.pcall('INCR', counter)
  if type(f) ~= 'number' then
    if f.err:find('^ERR') or f.err:find('^WRONGTYPE') then f = {err = 'FENCE the counter is not a number'} end
    return nil, f
  end
  if f < FENCE_SANE_MIN then
    -- The counter was lost: start above every fence that a client can have seen.
    f = math.max(now_us(), (tonumber(seen) or 0) + 1)
    redis.call('SET', counter, string.format('%.0f', f))
  end
  if f > FENCE_MAX then return nil, {err = 'FENCE the counter is above 2^52'} end
  return string.format('%016.0f', f)
end

-- Publishes a message to an inbox. SPUBLISH also reaches subscribers of replicas but counts only those of this
-- server, so neither its delivery nor its count shows who has the lock.
local function say(inbox, text)
  redis.pcall('SPUBLISH', inbox, text)
end

-- The value to send to a client: a fixed text if it is longer than any value of ours.
local function clipped(value)
  return value and #value > VALUE_MAX and TOO_LONG or value
end

-- Whether an inbox has a subscriber on this server. A grant is published only then: a subscriber of a
-- server that became a replica would receive a grant that went to the next waiter. An error counts as no.
local function listens(inbox)
  return (redis.pcall('PUBSUB', 'SHARDNUMSUB', inbox)[2] or 0) > 0
end

-- Notifies the waiter at a rank when to look again.
local function hint(rank, ms)
  local waiter = redis.call('ZRANGE', queue, rank, rank)[1]
  if not waiter then return end
  local token, inbox = waiter:match('^(%S+) (%S+)')
  if inbox and inbox ~= '-' then say(inbox, 'N ' .. token .. ' ' .. ms) end
end

-- Writes the holder, for `ms`.
local function hold(fence, token, inbox, ttl, owner, ms)
  redis.call('SET', lock, 'lh1 ' .. redis.call('EXISTS', queue) .. ' ' .. token .. ' ' .. fence .. ' ' ..
    inbox .. ' ' .. now_ms() .. ' ' .. ttl .. ' ' .. owner, 'PX', ms)
end

-- Gives the lock to the first waiter that listens: removes it from the queue, notifies it, writes the holder.
-- The entry `me` gets its full lease with the reply; with `before`, only tickets below it are served.
-- -> 'me', fence | 'gave' | 'nobody' (no waiter is left) | 'again' | 'unusable', error
-- Only 'me' and 'gave' change the lock. A waiter that was removed is never put back: ZADD into an empty queue
-- would create one without expiry.
local function hand_off(provisional, me, before)
  -- A value of another type, written by another client, is not a queue and has no waiters.
  if redis.call('TYPE', queue).ok ~= 'zset' then return 'nobody' end
  -- A write that is permitted when memory is full. After it, no write of this script is refused for memory.
  redis.call('ZREM', queue, '')
  local fence, err = next_fence()
  if not fence then return 'unusable', err end
  for _ = 1, SWEEP do
    if before then
      local first = redis.call('ZRANGE', queue, 0, 0, 'WITHSCORES')[2]
      if not first or tonumber(first) > before then return 'nobody' end
    end
    local waiter = redis.call('ZPOPMIN', queue)[1]
    if not waiter then return 'nobody' end
    local token, inbox, ttl, owner = waiter:match('^(%S+) (%S+) (%d+) %d+ (.*)$')
    -- An entry that leasehold did not write is no waiter.
    local ms, there = math.min(tonumber(ttl) or 0, provisional), token ~= nil
    if inbox == '-' then
      local polled = redis.call('HGET', polls, token)
      redis.call('HDEL', polls, token)
      there = polled and now_us() / 1000 - polled < POLL_GRACE_MS
    end
    if waiter == me then
      hold(fence, token, inbox, ttl, owner, ttl)
      return 'me', fence
    end
    if there and inbox ~= '-' then there = listens(inbox) end
    if there then
      if inbox ~= '-' then say(inbox, 'G ' .. token .. ' ' .. fence .. ' ' .. ms) end
      hold(fence, token, inbox, ttl, owner, ms)
      hint(0, ms)
      return 'gave'
    end
  end
  return 'again'
end

-- Passes the lock to the next waiter, or frees it. -> true: done
-- false: again. The value keeps its token, but with flag R, so that no renewal can prolong it, and with a
-- short expiry. Dead waiters are in front: the first and the last waiter are notified in case the caller dies now.
local function pass_on(provisional)
  local outcome = hand_off(provisional)
  if outcome == 'gave' then return true end
  if outcome ~= 'again' then
    redis.call('DEL', lock)
    return true
  end
  redis.call('SETRANGE', lock, 4, 'R')
  redis.call('PEXPIRE', lock, provisional, 'LT')
  hint(0, provisional)
  hint(-1, provisional)
  return false
end
