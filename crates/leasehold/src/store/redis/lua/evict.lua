-- Takes the lock away from the holder that was inspected, and from no other.
-- KEYS lock queue fence polls   ARGV holder_id provisional_ms "revoke"|"force"
-- holder_id: the beginning of the SHA-1 of the holder's token, or of a foreign holder's value
-- replies {"done", value, ms_left} | {"changed hands", value, ms_left} | {"free"}
--         {"foreign", value, ms_left}   it cannot be revoked; value: the name of the type if it is not a string
--         {"again", value, ms_left}     only for force
-- value and ms_left describe the holder before the call.
--#head
local value, left = redis.pcall('GET', lock), redis.call('PTTL', lock)
if type(value) == 'table' then return {'foreign', redis.call('TYPE', lock).ok, left} end
value = clipped(value)
if not value then return {'free'} end
local token, digits, inbox = value:match('^lh1 [01R] ([%w_%-]+) (%d+) (%S+) %d+ %d+ ')
local ours = token and #token == 32 and #digits == 16
if redis.sha1hex(ours and token or value):sub(1, #ARGV[1]) ~= ARGV[1] then
  return {'changed hands', value, left}
end
local provisional, force = tonumber(ARGV[2]), ARGV[3] == 'force'
if not force then
  if not ours then return {'foreign', value, left} end
  redis.call('ZREM', queue, '') -- permitted when memory is full, and the next writes then are too
  redis.call('SETRANGE', lock, 4, 'R')
end
if ours and inbox ~= '-' then say(inbox, 'R ' .. token) end
if not force then return {'done', value, left} end
if ours then return {pass_on(provisional) and 'done' or 'again', value, left} end
-- A foreign value is never changed: it stays until a waiter takes over.
local outcome = hand_off(provisional)
if outcome == 'nobody' or outcome == 'unusable' then redis.call('DEL', lock) end
return {outcome == 'again' and 'again' or 'done', value, left}
