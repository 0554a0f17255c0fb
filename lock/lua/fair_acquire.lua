-- Takes the mutex if it is free and no waiter is ahead; otherwise takes a place in the queue.
--
-- KEYS  1 lock  2 fence  3 ended attempts  4 queue  5 alive
-- ARGV  1 token  2 life of the lease, ms  3 life of the fence, ms
--       4 life of a waiter that does not ask, ms  5 '1': take a place in the queue; '0': only try
--       6… tokens of other waiters of the process, which keep their places
--       the last: server's time after which the caller has left, µs: the error LATE, with the time
--
-- Returns the fence if this token holds the mutex, also when it asks again; or {held, fence, 0, 0, 0, 0, expired}
-- with the token before, if its lease ended without a release. Otherwise it returns
--   {busy, number, ahead, last, age, place, holder, lost…}
--           number = ms after which the answer has changed at the latest
--           ahead  = number of waiters ahead
--           last   = the last fence; age = time since its grant, µs
--           place  = number by which the queue is ordered; 0: not in the queue
--           holder = its token
--           lost   = of the other waiters, those that have no place any more
--   {kept, number, ahead, last, age, place, first, lost…} the mutex is free for the first in the queue
--   {refused, 0} this attempt was abandoned or released before the command arrived
--
-- queue orders the waiters by a number given at arrival, never by a time. alive has the time until
-- which each waiter counts as alive; each command of a waiter prolongs its own. The fraction of
-- that time tells how long a waiter may live: for less than 2^(64 × fraction) ms. The holder of the
-- mutex is in neither.

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local ms = math.floor(now / 1000)
local ended = redis.call('ZSCORE', KEYS[3], ARGV[1])
if ended and tonumber(ended) > ms then return {'refused', 0} end
if now > tonumber(ARGV[#ARGV]) then return redis.error_reply('LATE ' .. string.format('%.0f', now)) end
local holder = redis.call('GET', KEYS[1])
local left = -1
if holder then left = redis.call('PTTL', KEYS[1]) end
local ours = holder == ARGV[1]
local last, before = lastGrant(redis.call, KEYS[2])
if ours and last and last > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('ZREM', KEYS[5], ARGV[1])
  return last
end
if holder and left == -1 then return redis.error_reply('FOREIGN the key has no expiry, so it is no lock of ours') end
if not last then return redis.error_reply('FOREIGN the key of the fence holds something else') end

local function outlive(key) -- a waiter with a short life must not shorten the lives of others
  if redis.call('PTTL', key) < 2 * ARGV[4] then redis.call('PEXPIRE', key, 2 * ARGV[4]) end
end

local _, exponent = math.frexp(tonumber(ARGV[4]))
local lives = string.format('%.6f', ms + ARGV[4] + (exponent < 40 and exponent / 64 or 0))
local tail = redis.call('ZRANGE', KEYS[4], -1, -1, 'WITHSCORES')[2]
local place = redis.call('ZSCORE', KEYS[4], ARGV[1])
if place then redis.call('ZADD', KEYS[5], lives, ARGV[1]) end
local lost = {}
for i = 6, #ARGV - 1 do
  if redis.call('ZSCORE', KEYS[4], ARGV[i]) then redis.call('ZADD', KEYS[5], lives, ARGV[i]) else lost[#lost + 1] = ARGV[i] end
end
if place or #ARGV > 6 + #lost then outlive(KEYS[5]) end
-- After the clock was put back, waiters would live longer than they may, and a dead one would block
-- the queue.
for _, waiter in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], string.format('%.0f', ms + ARGV[4] + 1), '+inf')) do
  local life = redis.call('ZSCORE', KEYS[5], waiter) % 1
  local longest = ms + 2 ^ (64 * life) + life
  if life > 0 and longest < tonumber(redis.call('ZSCORE', KEYS[5], waiter)) then
    redis.call('ZADD', KEYS[5], string.format('%.6f', longest), waiter)
  end
end
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', ms))) do
  redis.call('ZREM', KEYS[4], dead)
  redis.call('ZREM', KEYS[5], dead)
end
local head
repeat -- a waiter that is not in alive is dead, too
  head = redis.call('ZRANGE', KEYS[4], 0, 0)[1]
  local alive = not head or redis.call('ZSCORE', KEYS[5], head)
  if not alive then redis.call('ZREM', KEYS[4], head) end
until alive

if ours or not holder and (head == ARGV[1] or not head) then
  local fence = math.max(last + 1, now)
  -- Before the grant: without the permission for this nothing is granted.
  if place or redis.call('ZSCORE', KEYS[5], ARGV[1]) then
    redis.call('ZREM', KEYS[4], ARGV[1])
    redis.call('ZREM', KEYS[5], ARGV[1])
  end
  redis.call('SET', KEYS[2], string.format('%.0f ', fence) .. ARGV[1], 'PX', ARGV[3])
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  if before == '' or before == ARGV[1] then before = nil end
  return granted(fence, false, {before})
end
if not holder then left = math.max(tonumber(redis.call('ZSCORE', KEYS[5], head)) - ms, 0) end
if ARGV[5] == '1' then
  -- First this: without the permission for it, no key may be left without a TTL.
  outlive(KEYS[4])
  if not place then
    place = string.format('%.0f', (tonumber(tail) or 0) + 1)
    redis.call('ZADD', KEYS[4], place, ARGV[1])
    redis.call('ZADD', KEYS[5], lives, ARGV[1])
    outlive(KEYS[4])
    outlive(KEYS[5])
  end
else
  -- A write: a replica refuses it, since its data may be old.
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', ms))
end
local ahead = redis.call('ZRANK', KEYS[4], ARGV[1]) or redis.call('ZCARD', KEYS[4])
local reply = {holder and 'busy' or 'kept', math.max(left, 0), ahead, last, math.max(now - last, 0), tonumber(place or 0), holder or head}
for _, token in ipairs(lost) do reply[#reply + 1] = token end
return reply
