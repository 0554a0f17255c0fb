-- Takes the mutex if it is free and no waiter is ahead; otherwise takes a place in the queue.
--
-- KEYS  1 lock  2 fence  3 ended attempts  4 queue  5 alive
-- ARGV  1 token  2 life of the lease, ms  3 life of the fence, ms
--       4 life of a process that does not ask, ms  5 '1': take a place in the queue; '0': only try
--       6… tokens of other waiters of the process, which take or keep places: a hundred at most
--       the last: server's time after which the caller has left, µs: the error LATE, with the time
--
-- Returns the fence if this token holds the mutex, also when it asks again; or
--   {held, fence, 0, 0, 0, 0, expired, places…}
--           expired = the token before, if its lease ended without a release, or ''
--           places  = as below
-- Otherwise it returns
--   {busy, number, ahead, last, age, place, holder, places…}
--           number = ms after which the answer has changed at the latest
--           ahead  = number of waiters ahead
--           last   = the last fence; age = time since its grant, µs
--           place  = number by which the queue is ordered; 0: not in the queue
--           holder = its token
--           places = of the other waiters; 0: it has ended
--   {kept, number, ahead, last, age, place, first, places…} the mutex is free for the first in the queue
--   {refused, 0} this attempt was abandoned or released before the command arrived
--
-- queue orders the waiters by a number given at arrival, never by a time. alive has the time until
-- which each process counts as alive, by the first twelve characters of its tokens; each command of
-- a waiter prolongs it for all waiters of its process. The fraction of that time tells how long a
-- process may live: for less than 2^(64 × fraction) ms. The holder of the mutex is not in the queue.
--
-- So what one command does is bounded, however many wait. It removes at most a thousand dead waiters
-- from the head of the queue. It also looks at some others, from a place that depends on the time: dead
-- waiters behind a living one leave the queue when others enter it.

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
  leaveQueue(redis.call, KEYS[4], KEYS[5], ARGV[1])
  return last
end
if holder and left == -1 then return redis.error_reply('FOREIGN the key has no expiry, so it is no lock of ours') end
if not last then return redis.error_reply('FOREIGN the key of the fence holds something else') end

local function outlive(key) -- a process with a short life must not shorten the lives of others
  if redis.call('PTTL', key) < 2 * ARGV[4] then redis.call('PEXPIRE', key, 2 * ARGV[4]) end
end

local process = string.sub(ARGV[1], 1, 12)
local _, exponent = math.frexp(tonumber(ARGV[4]))
local lives = string.format('%.6f', ms + ARGV[4] + (exponent < 40 and exponent / 64 or 0))
local tail = tonumber(redis.call('ZRANGE', KEYS[4], -1, -1, 'WITHSCORES')[2] or 0)
local place = redis.call('ZSCORE', KEYS[4], ARGV[1])
if place then
  redis.call('ZADD', KEYS[5], lives, process)
  outlive(KEYS[5])
end
-- After the clock was put back, processes would live longer than they may, and a dead one would block
-- the queue.
for _, other in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], string.format('%.0f', ms + ARGV[4] + 1), '+inf')) do
  local life = redis.call('ZSCORE', KEYS[5], other) % 1
  local longest = ms + 2 ^ (64 * life) + life
  if life > 0 and longest < tonumber(redis.call('ZSCORE', KEYS[5], other)) then
    redis.call('ZADD', KEYS[5], string.format('%.6f', longest), other)
  end
end
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', string.format('%.0f', ms), 'LIMIT', 0, 100)) do
  redis.call('ZREM', KEYS[5], dead)
end

local ends = {}
-- Returns until when a waiter counts as alive, or false.
local function alive(token)
  local id = string.sub(token, 1, 12)
  if ends[id] == nil then
    local time = tonumber(redis.call('ZSCORE', KEYS[5], id) or 0)
    ends[id] = time > ms and time
  end
  return ends[id]
end

local head
for _, most in ipairs({1, 1000}) do
  local dead = 0
  for _, waiter in ipairs(redis.call('ZRANGE', KEYS[4], 0, most - 1)) do
    head = waiter
    if alive(waiter) then break end
    dead, head = dead + 1, nil
  end
  if dead == 0 then break end
  redis.call('ZREMRANGEBYRANK', KEYS[4], 0, dead - 1)
end
head = head or redis.call('ZRANGE', KEYS[4], 0, 0)[1]
local many = redis.call('ZCARD', KEYS[4])
local from = many > 10 and now % many or 0
for _, waiter in ipairs(redis.call('ZRANGE', KEYS[4], from, from + 2 * #ARGV)) do
  if waiter ~= head and not alive(waiter) then redis.call('ZREM', KEYS[4], waiter) end
end

-- Returns the place of a waiter, which takes one if it has none.
local function placeOf(token)
  local has = redis.call('ZSCORE', KEYS[4], token)
  if has then return has end
  local mark = redis.call('ZSCORE', KEYS[3], token)
  if mark and tonumber(mark) > ms then return '0' end
  tail = tail + 1
  redis.call('ZADD', KEYS[4], string.format('%.0f', tail), token)
  return string.format('%.0f', tail)
end

local function placesOf(tokens)
  local places = {}
  if not tokens[1] then return places end
  -- First this: without the permission for it, no key may be left without a TTL.
  outlive(KEYS[4])
  for i, token in ipairs(tokens) do places[i] = placeOf(token) end
  redis.call('ZADD', KEYS[5], lives, process)
  outlive(KEYS[4])
  outlive(KEYS[5])
  return places
end

local others = {unpack(ARGV, 6, #ARGV - 1)}
if ours or not holder and (head == ARGV[1] or not head) then
  local fence = math.max(last + 1, now)
  -- Before the grant: without the permission for this nothing is granted.
  if place then leaveQueue(redis.call, KEYS[4], KEYS[5], ARGV[1]) end
  local places = placesOf(others)
  redis.call('SET', KEYS[2], string.format('%.0f ', fence) .. ARGV[1], 'PX', ARGV[3])
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  if before == '' or before == ARGV[1] then before = nil end
  if before or places[1] then table.insert(places, 1, before or '') end
  return granted(fence, false, places)
end
if not holder then left = math.max((alive(head) or 0) - ms, 0) end
local places = {}
if ARGV[5] == '1' then
  table.insert(others, 1, ARGV[1])
  places = placesOf(others)
  place = table.remove(places, 1)
else
  -- A write: a replica refuses it, since its data may be old.
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', ms))
end
local ahead = redis.call('ZRANK', KEYS[4], ARGV[1]) or redis.call('ZCARD', KEYS[4])
local reply = {holder and 'busy' or 'kept', math.max(left, 0), ahead, last, math.max(now - last, 0), tonumber(place or 0), holder or head}
for _, other in ipairs(places) do reply[#reply + 1] = other end
return reply
