-- Take the mutex, if nobody holds it and nobody has come before; else stand in the queue.
--
-- KEYS  1 lock  2 fence  3 tombstone of this attempt  4 queue  5 alive
-- ARGV  1 token  2 life of the lease, ms  3 life of the fence, ms
--       4 life of a waiter that is not heard of, ms  5 '1': stand in the queue; '0': only try
--
-- Returns the fence if it is held (asking again with the same token says so again), else {state, number, ahead}
--   busy    number = in how many ms something will have changed at the latest, ahead = how many waiters come first
--   refused this attempt was abandoned, or has been released, before it arrived
--
-- queue orders waiters by a number given at arrival, never by a time. alive has the time until which each is
-- taken to be alive, and every call renews the caller's own. Nobody who holds the mutex is in either.

if redis.call('EXISTS', KEYS[3]) == 1 then return {'refused', 0, 0} end
local holder = redis.call('GET', KEYS[1])
local left = -1
if holder then left = redis.call('PTTL', KEYS[1]) end
local ours = holder == ARGV[1]
local fence = ours and tonumber(redis.call('GET', KEYS[2]))
if fence then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('ZREM', KEYS[5], ARGV[1])
  return fence
end
if holder and left == -1 then return redis.error_reply('FOREIGN the key has no expiry, so it is no lock of ours') end
local rank = redis.call('ZRANK', KEYS[4], ARGV[1])
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local ms = math.floor(now / 1000)

local function outlive(key) -- a waiter with a short life must not cut those of the others
  if redis.call('PTTL', key) < 2 * ARGV[4] then redis.call('PEXPIRE', key, 2 * ARGV[4]) end
end

local tail = redis.call('ZRANGE', KEYS[4], -1, -1, 'WITHSCORES')[2]
if rank then
  redis.call('ZADD', KEYS[5], string.format('%.0f', ms + ARGV[4]), ARGV[1])
  outlive(KEYS[5])
end
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', ms))) do
  redis.call('ZREM', KEYS[4], dead)
  redis.call('ZREM', KEYS[5], dead)
end
local head
repeat -- one of whom nothing is known is dead as well
  head = redis.call('ZRANGE', KEYS[4], 0, 0)[1]
  local alive = not head or redis.call('ZSCORE', KEYS[5], head)
  if not alive then redis.call('ZREM', KEYS[4], head) end
until alive

if ours or not holder and (head == ARGV[1] or not head) then
  local last = tonumber(redis.call('GET', KEYS[2]) or 0)
  if not last then return redis.error_reply('FOREIGN the key of the fence holds something else') end
  fence = math.max(last + 1, now)
  if rank or redis.call('ZSCORE', KEYS[5], ARGV[1]) then -- before it is taken: if this right is missing, nothing is
    redis.call('ZREM', KEYS[4], ARGV[1])
    redis.call('ZREM', KEYS[5], ARGV[1])
  end
  redis.call('SET', KEYS[2], fence, 'PX', ARGV[3])
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return fence
end
if not holder then left = math.max(tonumber(redis.call('ZSCORE', KEYS[5], head)) - ms, 0) end
if ARGV[5] == '1' then
  outlive(KEYS[4]) -- if this right is missing, nothing is to be left without an end
  if not rank then
    redis.call('ZADD', KEYS[4], string.format('%.0f', (tonumber(tail) or 0) + 1), ARGV[1])
    redis.call('ZADD', KEYS[5], string.format('%.0f', ms + ARGV[4]), ARGV[1])
    outlive(KEYS[4])
    outlive(KEYS[5])
  end
end
return {'busy', math.max(left, 0), redis.call('ZRANK', KEYS[4], ARGV[1]) or redis.call('ZCARD', KEYS[4])}
