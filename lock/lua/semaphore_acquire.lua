-- Take one of size places, if one is free.
--
-- KEYS  1 holders  2 fence  3 tombstone of this attempt  4 details
-- ARGV  1 token  2 life of the lease, ms  3 life of the fence, ms  4 size
--
-- Returns the fence if it is held (asking again with the same token says so again), else {state, number}
--   busy    number = in how many ms the next lease ends, if nobody renews it
--   size    number = the size that those who hold a place have given
--   refused this attempt was abandoned, or has been released, before it arrived
--
-- holders has the end of each lease, in ms of the server's clock; details has the fence of each, and the size.

if redis.call('EXISTS', KEYS[3]) == 1 then return {'refused', 0} end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local ms = math.floor(now / 1000)
for _, ended in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', ms))) do
  redis.call('ZREM', KEYS[1], ended)
  redis.call('HDEL', KEYS[4], ended)
end

local taken = redis.call('ZCARD', KEYS[1])
if taken == 0 and redis.call('HLEN', KEYS[4]) > 0 then redis.call('DEL', KEYS[4]) end -- HLEN minds what it is
local size = redis.call('HGET', KEYS[4], 'size')
if size and size ~= ARGV[4] then return {'size', tonumber(size)} end
local fence
if redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  fence = tonumber(redis.call('HGET', KEYS[4], ARGV[1]))
elseif taken >= tonumber(ARGV[4]) then
  local next = tonumber(redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2])
  return {'busy', next - ms}
end
if not fence then
  local last = tonumber(redis.call('GET', KEYS[2]) or 0)
  if not last then return redis.error_reply('FOREIGN the key of the fence holds something else') end
  fence = math.max(last + 1, now)
  redis.call('SET', KEYS[2], string.format('%.0f', fence), 'PX', ARGV[3])
end

-- The order is such that a missing right is found out before anything is left without an end.
local ends = tonumber(redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2] or 0)
ends = string.format('%.0f', math.max(ms + ARGV[2], ends) + 1000)
redis.call('PEXPIREAT', KEYS[4], ends)
redis.call('HSET', KEYS[4], ARGV[1], string.format('%.0f', fence), 'size', ARGV[4])
redis.call('PEXPIREAT', KEYS[4], ends)
redis.call('ZADD', KEYS[1], string.format('%.0f', ms + ARGV[2]), ARGV[1])
redis.call('PEXPIREAT', KEYS[1], ends)
return fence
