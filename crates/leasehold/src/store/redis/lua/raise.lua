-- Raises the fence counter, once per connection and before its first grant: a fence that was lost with the server's
-- data is not drawn again.
-- KEYS fence   ARGV seen_fence(the highest that this client saw) inbox
-- replies {fence, server time in µs}; fence is "" if the counter cannot be used: grants report that
--         themselves, and held locks can still be renewed and released
-- errors  NOPERM: subscribers cannot be counted, so no lock could be granted safely to a waiter
--#limits
local counted = redis.pcall('PUBSUB', 'SHARDNUMSUB', ARGV[2])
if counted.err then
  return {err = 'NOPERM PUBSUB SHARDNUMSUB is refused, which counts the subscribers before a lock is handed over: ' ..
    'add +pubsub|shardnumsub to the user'}
end
redis.call('PERSIST', KEYS[1]) -- permitted when memory is full, and all later writes then are too
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local us = string.format('%.0f', now)
local text = redis.pcall('GET', KEYS[1]) or '0'
local counter = type(text) == 'string' and tonumber(text)
if not counter then return {'', us} end
local fence = math.max(counter, now, tonumber(ARGV[1]) + 1)
if fence > FENCE_MAX then return {'', us} end
fence = string.format('%.0f', fence)
-- No SET where INCR is enough: people count SETs to see that a claim is one command.
if #text <= #fence then redis.call('SETRANGE', KEYS[1], 0, fence) else redis.call('SET', KEYS[1], fence) end
return {fence, us}
