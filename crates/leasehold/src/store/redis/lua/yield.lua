-- Hands a lock that a try took to an earlier waiter, if the try found a queue.
-- KEYS lock queue fence polls   ARGV token fence provisional_ms
-- replies {"ours"}             no waiter with an earlier ticket listens, or the value has another fence: another call
--                              with this token has confirmed the lease, and its caller relies on it
--         {"held", value|""}   handed to a waiter, or the lease had ended
--         {"revoked"}          release it
--         {"again"}
--#head
local value = redis.pcall('GET', lock)
if type(value) ~= 'string' or value:sub(7, 38) ~= ARGV[1] then
  return {'held', type(value) == 'string' and clipped(value) or ''}
end
if value:sub(5, 5) == 'R' then return {'revoked'} end
local written = value:sub(40, 55)
if written ~= '0000000000000000' and written ~= ARGV[2] then return {'ours'} end
local outcome = hand_off(tonumber(ARGV[3]), nil, tonumber(ARGV[2]))
if outcome == 'gave' then return {'held', redis.call('GET', lock)} end
if redis.call('EXISTS', queue) == 1 then redis.call('SETRANGE', lock, 4, '1') end
return {outcome == 'again' and 'again' or 'ours'}
