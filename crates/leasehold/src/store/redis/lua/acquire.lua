-- Takes the lock or joins its queue. Idempotent on the token.
-- KEYS lock queue fence polls
-- ARGV token inbox ttl_ms since_ms owner ticket(0: none yet) provisional_ms queue_ttl_ms seen_fence
-- replies {"granted", fence}                             for ttl_ms, counted from this call
--         {"queued", ticket, position, ms_left, value}   value: the holder's, or nothing
--         {"again", ticket}
--         {"revoked"}                                    the lock was granted and has been revoked: release it
-- errors  OOM, FENCE: nothing was granted
--#head
local token, inbox, ttl, provisional = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[7])
-- Not GET: waiters send this repeatedly, and a foreign value may have many megabytes.
local value = redis.pcall('GETRANGE', lock, 0, VALUE_MAX)
if type(value) == 'table' then
  value = redis.call('TYPE', lock).ok -- not even a string: foreign
elseif value == '' and redis.call('EXISTS', lock) == 0 then
  value = false
end

if value and value:sub(7, 38) == token then
  -- Sent again, or granted by a push that was lost: confirm.
  if value:sub(5, 5) == 'R' then return {'revoked'} end
  if redis.call('PEXPIRE', lock, ttl, 'GT') == 0 and redis.call('PTTL', lock) == -1 then
    redis.call('PEXPIRE', lock, ttl)
  end
  local fence, err = value:sub(40, 55), nil
  if fence == '0000000000000000' then
    fence, err = next_fence(ARGV[9])
    if not fence then return err end
    redis.call('SETRANGE', lock, 39, fence)
  end
  return {'granted', fence}
end

if not value and redis.call('EXISTS', queue) == 0 then
  local fence, err = next_fence(ARGV[9])
  if not fence then return err end
  hold(fence, token, inbox, ttl, ARGV[5], ttl)
  return {'granted', fence}
end

local me = token .. ' ' .. inbox .. ' ' .. ttl .. ' ' .. ARGV[4] .. ' ' .. ARGV[5]
local ticket, err = redis.call('ZSCORE', queue, me), nil
if ticket then
  ticket = string.format('%.0f', ticket)
else
  ticket = ARGV[6]
  if ticket == '0' then ticket, err = next_fence(ARGV[9]) end
  if not ticket then return err end
  redis.call('ZADD', queue, ticket, me) -- when memory is full, this fails before anything has changed
end
redis.call('PEXPIRE', queue, ARGV[8])
if inbox == '-' then
  redis.call('HSET', polls, token, now_ms())
  redis.call('PEXPIRE', polls, ARGV[8])
end

local full -- the full ttl of a holder that is a client of leasehold
if not value then
  local outcome, extra = hand_off(provisional, me)
  if outcome == 'me' then return {'granted', extra} end
  if outcome == 'again' then return {'again', ticket} end
  if outcome == 'unusable' then return extra end
  value = redis.call('GET', lock)
else
  -- A value that only begins like ours is foreign, and is never changed.
  local holder, digits, recorded = value:match('^lh1 [01R] ([%w_%-]+) (%d+) %S+ %d+ (%d+) ')
  if holder and #holder == 32 and #digits == 16 then
    full = recorded
    if value:sub(5, 5) == '0' then redis.call('SETRANGE', lock, 4, '1') end -- never replaces R
  end
end
local left = redis.call('PTTL', lock)
if full and left == -1 then
  -- Another program removed the expiry. A full ttl from now outlasts any belief.
  redis.call('PEXPIRE', lock, full)
  left = tonumber(full)
end
return {'queued', ticket, redis.call('ZRANK', queue, me), left, clipped(value)}
