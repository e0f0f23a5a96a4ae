-- Renews, confirms, extends. Never shortens, never re-creates, works when memory is full.
-- KEYS lock   ARGV token ttl_ms fence(16 digits, or "": unfenced) [owner]
-- fence: must be the value's own, or is written where that is still zeros. Another one means that the
--        token was granted anew since: the lease this fence belongs to is over.
-- owner: ttl and owner are written into the value.
-- replies "renewed" | "lost" | "revoked"
local value = redis.pcall('GET', KEYS[1])
if type(value) ~= 'string' or value:sub(7, 38) ~= ARGV[1] then return 'lost' end
if value:sub(5, 5) == 'R' then return 'revoked' end
local fence = value:sub(40, 55)
local write = ARGV[3] ~= '' and ARGV[3] ~= fence
if write and fence ~= '0000000000000000' then return 'lost' end
-- GT counts a key without expiry as endless: somebody removed it, so it is set again.
if redis.call('PEXPIRE', KEYS[1], ARGV[2], 'GT') == 0 and redis.call('PTTL', KEYS[1]) == -1 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
if write then
  redis.call('SETRANGE', KEYS[1], 39, ARGV[3])
  fence = ARGV[3]
end
if ARGV[4] then
  local inbox, since, old = value:match('^(%S+) (%d+) (.*)$', 57)
  local new = ARGV[2] .. ' ' .. ARGV[4]
  if old ~= new then
    redis.call('SET', KEYS[1], value:sub(1, 39) .. fence .. ' ' .. inbox .. ' ' .. since .. ' ' .. new, 'KEEPTTL')
  end
end
return 'renewed'
