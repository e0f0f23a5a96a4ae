-- Renews, confirms, extends or hands over a lease, or only checks it. Never shortens, never re-creates, works when
-- memory is full.
-- KEYS lock   ARGV token ttl_ms("": a check, nothing is written) fence(16 digits, or "": unfenced) [owner [hand_to]]
-- fence: must be that of the value, or is written if the value still has zeros. Another one means that the
--        token was granted anew since, and that the lease with this fence has ended.
-- owner: ttl and owner are written into the value; "" keeps both.
-- hand_to: transfers the lease to that token, which may be its own, and to no process. A repetition recognizes
--        the transfer by the fence.
-- replies "renewed" | "lost" | "revoked"
local value = redis.pcall('GET', KEYS[1])
if type(value) ~= 'string' then return 'lost' end
local token, fence = value:sub(7, 38), value:sub(40, 55)
if token ~= ARGV[1] and (token ~= ARGV[5] or fence ~= ARGV[3]) then return 'lost' end
if value:sub(5, 5) == 'R' then return 'revoked' end
local write = ARGV[3] ~= '' and ARGV[3] ~= fence
if write and fence ~= '0000000000000000' then return 'lost' end
if ARGV[2] == '' then return 'renewed' end
-- GT treats a key without expiry as endless. Another program removed the expiry, so it is set again.
if redis.call('PEXPIRE', KEYS[1], ARGV[2], 'GT') == 0 and redis.call('PTTL', KEYS[1]) == -1 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
if write then
  redis.call('SETRANGE', KEYS[1], 39, ARGV[3])
  fence = ARGV[3]
end
if ARGV[4] then
  local inbox, since, record = value:match('^(%S+) (%d+) (.*)$', 57)
  if ARGV[4] ~= '' then record = ARGV[2] .. ' ' .. ARGV[4] end
  if ARGV[5] then token, inbox = ARGV[5], '-' end
  local new = value:sub(1, 6) .. token .. ' ' .. fence .. ' ' .. inbox .. ' ' .. since .. ' ' .. record
  if new ~= value then redis.call('SET', KEYS[1], new, 'KEEPTTL') end
end
return 'renewed'
