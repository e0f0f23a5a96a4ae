-- Creates a binding together with a slot on a node. A binding without a slot needs no script.
-- KEYS binding slots   ARGV value claim keep_ms places
-- replies {"created"} | {"exists", value} | {"no slot"} | {"too long"}: a value of another client, nothing was done
local found = redis.call('GETRANGE', KEYS[1], 0, STORED_MAX)
if #found > STORED_MAX then return {'too long'} end
if found ~= '' or redis.call('EXISTS', KEYS[1]) == 1 then
  if found:sub(5, 26) == ARGV[2] then return {'created'} end
  return {'exists', found}
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))
local last = tonumber(ARGV[4]) - 1
if last < 0 or #redis.call('ZRANGE', KEYS[2], last, last) > 0 then return {'no slot'} end
local first = redis.call('EXISTS', KEYS[2]) == 0
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], string.format('%.0f', now + ARGV[3]), ARGV[2])
if first then
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
else
  redis.call('PEXPIRE', KEYS[2], ARGV[3], 'GT')
end
return {'created'}
