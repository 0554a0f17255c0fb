-- Abandons an attempt: gives back its place, its reservation and its place among the waiting, and
-- refuses its commands in transit. If a place is free then, another waiter is woken, because this
-- attempt may have been woken for it.
--
-- KEYS  1 holders  2 ended attempts  3 reservation  4 waiting  5 details
-- ARGV  1 token  2 life of the mark, ms  3 how many marks are kept
--       4 life of a reservation after a release, ms
--
-- Returns 1 if it released a place, 0 if the attempt held nothing.

local time = redis.call('TIME')
local ms = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
local size = redis.pcall('HGET', KEYS[5], 'size') -- foreign details must not keep the holder's place
size = tonumber(type(size) == 'string' and size or 1)
local released = redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[5], ARGV[1])
local taken = redis.call('ZCARD', KEYS[1])
if taken == 0 then redis.call('DEL', KEYS[5]) end
if string.sub(redis.call('GET', KEYS[3]) or '', -#ARGV[1]) == ARGV[1] then redis.call('DEL', KEYS[3]) end
redis.pcall('ZREM', KEYS[4], ARGV[1])
if taken < size then wakeNext(KEYS[1], KEYS[3], KEYS[4], ARGV[4], size - taken > 1) end
mark(redis.call, KEYS[2], ARGV[1], ms, ARGV[2], ARGV[3])
return released
